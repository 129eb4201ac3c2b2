"""tessera.attention on JAX arrays, where JAX is installed."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import numpy as np
import pytest
from conftest import Problem

jax = pytest.importorskip("jax")

import tessera  # noqa: E402


CPU = jax.devices("cpu")[-1]  # where JAX has a GPU, or several devices, not its own choice


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_same_as_numpy(random, dtype):
    problem = Problem(random, dtype)
    arrays = [jax.device_put(x, CPU) for x in problem.arrays]
    o, lse = tessera.attention(*arrays, causal=True, return_lse=True)
    assert isinstance(o, jax.Array) and o.dtype == arrays[0].dtype and isinstance(lse, jax.Array)
    assert o.devices() == lse.devices() == {CPU}
    expected, expected_lse = tessera.attention(*problem.arrays, causal=True, return_lse=True)
    np.testing.assert_array_equal(np.asarray(o), expected)
    np.testing.assert_array_equal(np.asarray(lse), expected_lse)
    gradients = tessera.attention_backward(*arrays, o, lse, jax.device_put(problem.d_o, CPU), causal=True)
    again = tessera.attention_backward(*problem.arrays, expected, expected_lse, problem.d_o, causal=True)
    for gradient, other in zip(gradients[:3], again[:3]):
        np.testing.assert_array_equal(np.asarray(gradient), other)


@pytest.mark.skipif(
    len(jax.devices("cpu")) < 2, reason="JAX has one CPU (XLA_FLAGS=--xla_force_host_platform_device_count=2)"
)
def test_an_array_on_several_devices(random):
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:2], "b")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("b"))
    q, k, v = (jax.device_put(jax.numpy.zeros((2, 4, 1, 8)), sharding) for _ in range(3))
    with pytest.raises(tessera.Error, match="^q: a JAX array on 2 devices, accepted those on one"):
        tessera.attention(q, k, v)


def test_heads_first(random):
    problem = Problem(random)
    arrays = [jax.device_put(x.swapaxes(1, 2), CPU) for x in problem.arrays]
    o, lse = tessera.attention(*arrays, causal=True, return_lse=True, layout="bhsd")
    expected, expected_lse = tessera.attention(*problem.arrays, causal=True, return_lse=True)
    np.testing.assert_array_equal(np.asarray(o).swapaxes(1, 2), expected)
    np.testing.assert_array_equal(np.asarray(lse), expected_lse)


def test_a_traced_array(random):
    problem = Problem(random)
    with pytest.raises(tessera.Error, match="^q: traced by a JAX transformation"):
        jax.jit(tessera.attention)(*problem.arrays)
