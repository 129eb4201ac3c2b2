"""Attention written out in PyTorch: the reference in float64, and the same computation plainly in a tensor's own dtype."""

import math

import torch


def visible(seqlen_q, seqlen_k, causal=False, top_left=False, window=(-1, -1), seqused_k=None):
    """bool [B or 1, 1, Sq, Sk]."""
    lengths = torch.tensor([seqlen_k]) if seqused_k is None else seqused_k.to(torch.int64)
    i = torch.arange(seqlen_q)[:, None]
    j = torch.arange(seqlen_k)
    diagonal = i if top_left else i + lengths[:, None, None] - seqlen_q
    left, right = window
    allowed = (j < lengths[:, None, None]).expand(-1, seqlen_q, -1)
    if causal:
        allowed = allowed & (j <= diagonal)
    if left >= 0:
        allowed = allowed & (j >= diagonal - left)
    if right >= 0:
        allowed = allowed & (j <= diagonal + right)
    return allowed[:, None]


def attention(
    q, k, v, *, scale=None, softcap=0.0, bias=None, mask=None, alibi_slopes=None, sink=None, seqused_k=None,
    deterministic=False, **where,
):  # fmt: skip
    """o [B, Sq, Hq, Dv] and lse [B, Hq, Sq], in the dtype of q throughout."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    s = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias.to(s.dtype)
    allowed = visible(seqlen_q, seqlen_k, seqused_k=seqused_k, **where)
    if alibi_slopes is not None:
        lengths = torch.tensor([seqlen_k]) if seqused_k is None else seqused_k.to(torch.int64)
        i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
        distance = (i + lengths[:, None, None, None] - seqlen_q - j).abs().to(s.dtype)
        slopes = alibi_slopes if alibi_slopes.dim() == 2 else alibi_slopes[None]
        s = s - slopes[:, :, None, None].to(s.dtype) * distance
    if mask is not None:
        allowed = allowed & mask
    s = s.masked_fill(~allowed, -math.inf)
    columns = s if sink is None else torch.cat((s, sink.to(s.dtype)[None, :, None, None].expand(*s.shape[:3], 1)), -1)
    lse = torch.logsumexp(columns, -1)
    empty = lse == -math.inf
    p = torch.exp(s - lse.masked_fill(empty, 0.0)[..., None]).masked_fill(~allowed, 0.0)
    return (p @ v).transpose(1, 2), lse


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
