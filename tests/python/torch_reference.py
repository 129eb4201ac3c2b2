"""The reference in float64, and the same plain computation in a tensor's own dtype, for the interface of
tessera.torch."""

import math

import torch

from tessera.compare.float64 import attend


def attention(q, k, v, *, deterministic=False, **options):
    """o [B, Sq, Hq, Dv] and lse [B, Hq, Sq], in the dtype of q throughout, for tessera.torch.attention's arguments."""
    results = attend(torch, *heads_of(q, k, v), **terms(q, k, **options))
    return results.o.transpose(1, 2), results.lse


def heads_of(q, *keys):
    """[B, H, S, D], all with the heads of q."""
    return (q.transpose(1, 2), *(x.repeat_interleave(q.shape[2] // x.shape[2], 2).transpose(1, 2) for x in keys))


def terms(
    q, k, *, scale=None, softcap=0.0, bias=None, mask=None, alibi_slopes=None, sink=None, seqused_k=None,
    top_left=False,
    **where,
):  # fmt: skip
    """tessera.torch.attention's options as arguments of attend."""
    lengths = torch.tensor(k.shape[1]) if seqused_k is None else seqused_k.to(torch.int64)[:, None, None]
    diagonal = torch.arange(q.shape[1]) + (0 if top_left else lengths - q.shape[1])
    own = lambda x, *shape: None if x is None else x.to(q.dtype).reshape(*shape)  # noqa: E731
    return dict(
        diagonal=diagonal, scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale, softcap=softcap, mask=mask,
        bias=None if bias is None else bias.to(q.dtype), slope=own(alibi_slopes, -1, q.shape[2], 1, 1),
        seqlen=None if seqused_k is None else lengths[..., None], **where,
        **({} if sink is None else {"sink": own(sink, 1, -1, 1, 1)}),
    )  # fmt: skip


def check(name, ours, plain, exact):
    """The error against float64 is at most twice that of the same computation done plainly, plus a few roundings."""
    exact = exact.to(torch.float64)
    finite = torch.isfinite(exact)
    assert torch.equal(torch.isfinite(ours), finite), f"{name}: not finite elsewhere than the reference"
    assert torch.equal(ours[~finite].to(torch.float64), exact[~finite]), f"{name}: another infinity"
    if not finite.any():
        return
    epsilon = torch.finfo(ours.dtype).eps
    ours, plain, exact = (t.detach().to(torch.float64)[finite] for t in (ours, plain, exact))
    error, plain_error = (ours - exact).abs().max(), (plain - exact).abs().nan_to_num().max()
    floor = 4 * epsilon * exact.abs().max()
    assert error <= 2 * plain_error + floor, f"{name}: error {error:.3g}, plain {plain_error:.3g}, floor {floor:.3g}"


def random(*shape, dtype=torch.float32, requires_grad=True, seed=0):
    """The same values on every device."""
    generator = torch.Generator("cpu").manual_seed(seed + 7 * sum(shape))
    values = torch.randn(*shape, generator=generator, device="cpu")
    return values.to(torch.get_default_device(), dtype).requires_grad_(requires_grad)


def at(dtype, *tensors):
    """Copies with the same values in another dtype, leaves of a graph of their own."""
    return [None if t is None else t.detach().to(dtype).requires_grad_(t.requires_grad) for t in tensors]
