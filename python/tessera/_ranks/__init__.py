"""One rank's part of attention over many devices, as plain data: what tessera.torch and tessera.jax execute."""
