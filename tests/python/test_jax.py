"""tessera.attention on JAX arrays, where JAX is installed."""

import numpy as np
import pytest
from conftest import Problem

jax = pytest.importorskip("jax")

import tessera  # noqa: E402


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_same_as_numpy(random, dtype):
    problem = Problem(random, dtype)
    arrays = [jax.numpy.asarray(x) for x in problem.arrays]
    o, lse = tessera.attention(*arrays, causal=True, return_lse=True)
    assert isinstance(o, jax.Array) and o.dtype == arrays[0].dtype and isinstance(lse, jax.Array)
    expected, expected_lse = tessera.attention(*problem.arrays, causal=True, return_lse=True)
    np.testing.assert_array_equal(np.asarray(o), expected)
    np.testing.assert_array_equal(np.asarray(lse), expected_lse)
    gradients = tessera.attention_backward(*arrays, o, lse, jax.numpy.asarray(problem.d_o), causal=True)
    again = tessera.attention_backward(*problem.arrays, expected, expected_lse, problem.d_o, causal=True)
    for gradient, other in zip(gradients[:3], again[:3]):
        np.testing.assert_array_equal(np.asarray(gradient), other)


def test_a_traced_array(random):
    problem = Problem(random)
    with pytest.raises(tessera.Error, match="^q: traced by a JAX transformation"):
        jax.jit(tessera.attention)(*problem.arrays)
