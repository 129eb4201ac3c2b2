"""Inputs of the simulations: bfloat16, and normal numbers with outliers."""

import numpy as np


def bfloat16(x):
    """Rounded to the nearest, ties to even; as float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def draw(rng, shape, outliers):
    """Standard normal numbers in bfloat16; to the fraction `outliers` of them ten times another one is added."""
    x = rng.standard_normal(shape)
    if outliers:
        x += (rng.random(shape) < outliers) * 10 * rng.standard_normal(shape)
    return bfloat16(x)
