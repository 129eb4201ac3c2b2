"""Errors of the forward pass on a GPU, compared with those of cuDNN's attention on the same inputs."""

import pytest

torch = pytest.importorskip("torch")
tessera = pytest.importorskip("tessera")

import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import tessera.torch  # noqa: E402
from torch_reference import attention  # noqa: E402

BATCH, HEADS, LENGTH = 2, 4, 2048
# Both round P and O alike, cuDNN P against the running maximum of the row: there the largest weight so far is 1, which
# has no rounding error. Our stale max stays as long as no lane's share of a tile's sum passes 2^6 against it, so that
# its largest weights are rounded like any other. Seen for such a bound in simulation: at most 1.04 times the error of
# the running maximum's with normal inputs, where many weights share a row's sum, and 1.10 times with outliers, where
# few do. docs/reference/kernels/fwd_sm90.md, numerics, has the numbers and what the maximum would cost.
NORMAL_RATIO, OUTLIERS_RATIO = 1.05, 1.15


def draw(head_dim, dtype, outliers):
    """q, k, v [B, S, H, D], standard normal; with outliers, one element in a thousand has a normal of sd 10 added."""
    generator = torch.Generator("cuda").manual_seed(head_dim)
    shape = (BATCH, LENGTH, HEADS, head_dim)

    def normal():
        values = torch.randn(shape, generator=generator, device="cuda")
        if outliers:
            chosen = torch.rand(shape, generator=generator, device="cuda") < 1e-3
            values += chosen * 10 * torch.randn(shape, generator=generator, device="cuda")
        return values.to(dtype)

    return normal(), normal(), normal()


def relative_rms(o, exact):
    return float((o.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def assert_close_to(peer, ratio, ours, q, k, v, causal):
    """The error of `ours` against float64 is at most `ratio` times that of `peer`, another's result for the same
    inputs."""
    exact = attention(q.double(), k.double(), v.double(), causal=causal)[0]
    error, peer_error = relative_rms(ours, exact), relative_rms(peer, exact)
    assert error <= ratio * peer_error, f"relative RMS error {error:.3e}, the peer's {peer_error:.3e}"


def cudnn(q, k, v, causal):
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            peer = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
    except RuntimeError as error:
        pytest.skip(f"cuDNN takes no such call here: {str(error).splitlines()[0]}")
    return peer.transpose(1, 2)


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("outliers", [False, True], ids=["normal", "outliers"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kernel", ["fwd_sm80", "fwd_sm90"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_error_is_close_to_cudnn_s(device, dtype, kernel, head_dim, causal, outliers):
    q, k, v = draw(head_dim, dtype, outliers)
    if torch.cuda.get_device_capability() == (9, 0):
        assert tessera.plan(q, k, v, causal=causal, as_dict=True)["kernel"] == "fwd_sm90"
    elif kernel == "fwd_sm90":
        pytest.skip("a Hopper kernel")
    ours = tessera.torch.attention(q, k, v, causal=causal, kernel=kernel)
    assert_close_to(cudnn(q, k, v, causal), OUTLIERS_RATIO if outliers else NORMAL_RATIO, ours, q, k, v, causal)


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("outliers", [False, True], ids=["normal", "outliers"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_error_of_decoding_is_close_to_cudnn_s(device, dtype, head_dim, outliers):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a Hopper kernel")
    q, k, v = draw(head_dim, dtype, outliers)
    few = 8
    ours = [tessera.torch.attention(some, k, v, kernel="decode_sm90") for some in q.split(few, 1)]
    assert_close_to(
        cudnn(q, k, v, False), OUTLIERS_RATIO if outliers else NORMAL_RATIO, torch.cat(ours, 1), q, k, v, False
    )


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("falling", [False, True], ids=["growing", "falling"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_of_growing_magnitude(device, dtype, head_dim, causal, falling):
    """Keys whose length changes by four orders of magnitude along the sequence: each tile exceeds all earlier ones."""
    q, k, v = draw(head_dim, dtype, outliers=False)
    exponents = torch.linspace(-2, 2, LENGTH, device="cuda")
    k = (k.float() * 10 ** (exponents.flip(0) if falling else exponents)[None, :, None, None]).to(dtype)
    ours = tessera.torch.attention(q, k, v, causal=causal)
    assert_close_to(attention(q, k, v, causal=causal)[0], 2, ours, q, k, v, causal)
