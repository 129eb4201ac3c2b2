"""A small causal transformer learns to copy, with Tessera's attention under jax.jit and jax.grad."""

import jax
import jax.numpy as jnp
import tessera.jax

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 16, 32, 64, 4, 2


def parameters(key):
    def matrix(*shape):
        nonlocal key
        key, mine = jax.random.split(key)
        return jax.random.normal(mine, shape) / shape[0] ** 0.5

    def layer():
        return {
            "qkv": matrix(WIDTH, 3 * WIDTH), "out": matrix(WIDTH, WIDTH),
            "up": matrix(WIDTH, 4 * WIDTH), "down": matrix(4 * WIDTH, WIDTH),
        }  # fmt: skip

    words, places, head = matrix(VOCABULARY, WIDTH), matrix(LENGTH, WIDTH), matrix(WIDTH, VOCABULARY)
    return {"words": words, "places": places, "head": head, "layers": [layer() for _ in range(LAYERS)]}


def normalised(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def loss_of(p, tokens):
    x = p["words"][tokens] + p["places"]
    for layer in p["layers"]:
        q, k, v = jnp.split((normalised(x) @ layer["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)  # [B, S, H, D]
        x = x + tessera.jax.attention(q, k, v, causal=True).reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(normalised(x) @ layer["up"]) @ layer["down"]
    half = LENGTH // 2  # the second half repeats the first
    logits = jax.nn.log_softmax(normalised(x)[:, half - 1 : -1] @ p["head"])
    return -jnp.take_along_axis(logits, tokens[:, half:, None], -1).mean()


@jax.jit
def step(p, moments, n, key):
    words = jax.random.randint(key, (32, LENGTH // 2), 0, VOCABULARY)
    loss, gradient = jax.value_and_grad(loss_of)(p, jnp.concatenate([words, words], 1))
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradient)  # Adam
    second = jax.tree.map(lambda m, g: 0.999 * m + 0.001 * g * g, moments[1], gradient)
    scale = 3e-3 * jnp.sqrt(1 - 0.999**n) / (1 - 0.9**n)
    p = jax.tree.map(lambda x, a, b: x - scale * a / (jnp.sqrt(b) + 1e-8), p, first, second)
    return p, (first, second), loss


p = parameters(jax.random.key(0))
moments = (jax.tree.map(jnp.zeros_like, p),) * 2
for n in range(1, 101):
    p, moments, loss = step(p, moments, n, jax.random.key(n))
    if n % 20 == 1:
        print(f"step {n:3d}  loss {loss:.3f}")
print(f"step {n:3d}  loss {loss:.3f} (guessing: {jnp.log(VOCABULARY):.3f})")
assert loss < 1.0
