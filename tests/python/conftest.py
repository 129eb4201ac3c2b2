"""The float64 reference of the program's own tests, for one sequence or batch at a time."""

import contextlib
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "cli"))


class Problem:
    """q [B, Sq, H, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv] and d_o, normal, in one dtype."""

    def __init__(self, random, dtype="float32", b=2, sq=37, sk=45, h=4, hkv=2, d=24, dv=16):
        from reference import ROUND

        self.dtype = dtype
        self.random = random
        self.q = self.normal(b, sq, h, d)
        self.k = self.normal(b, sk, hkv, d)
        self.v = self.normal(b, sk, hkv, dv)
        self.d_o = self.normal(b, sq, h, dv)
        self.rounded = [ROUND[dtype](np.asarray(x, np.float32)) if dtype != "float64" else x for x in self.arrays]

    def normal(self, *shape):
        return self.random.standard_normal(shape).astype(numpy_dtype(self.dtype))

    @property
    def arrays(self):
        return [self.q, self.k, self.v]


# Units in the last place of the result's magnitude, beside twice the plain error. Between the passes the log-sum-exp,
# of magnitude up to 6 here, is rounded to float32: where products are not rounded more coarsely, that is what shows.
ULPS = {"float32": 16, "float64": 16, "float16": 4, "bfloat16": 4}


def assert_close(result, exact, plain, dtype):
    import reference

    reference.assert_close(result, exact, plain, dtype, ULPS[dtype])


def numpy_dtype(name):
    if name == "bfloat16":
        return pytest.importorskip("ml_dtypes").bfloat16
    return np.dtype(name)


@pytest.fixture
def random():
    return np.random.default_rng(11)


@pytest.fixture
def problem(random):
    return Problem(random)


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    """The device of PyTorch's tensors unless a test chooses another, and of Tessera's computation."""
    import tessera

    torch = pytest.importorskip("torch")
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("PyTorch sees no GPU")
        try:
            tessera.device("cuda")
        except tessera.Error as refusal:
            pytest.skip(str(refusal))
    # As a default, the CPU would cost each call of PyTorch's some microseconds.
    with contextlib.nullcontext() if request.param == "cpu" else torch.device(request.param):
        yield request.param
