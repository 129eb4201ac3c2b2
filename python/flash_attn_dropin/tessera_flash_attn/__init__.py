"""The folder of Tessera's `flash_attn`, last on the path. `python -m tessera_flash_attn` shows which package is
used."""
