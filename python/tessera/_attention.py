"""Attention on arrays of any framework. Outputs are created here, in the framework of q; the library writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from tessera import _core
from tessera._frameworks import check_arrays, framework_of, is_torch, output_dtype
from tessera._hints import with_options
from tessera._score import Bound, Mod, bind

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tessera._options import Options


class Gradients(NamedTuple):
    """The result of `attention_backward`. Each gradient has the shape of its input; `d_bias` and `d_sink` are float32,
    or None if not requested; `d_captured` is a dict by name, or None."""

    d_q: Any
    d_k: Any
    d_v: Any
    d_bias: Any = None
    d_sink: Any = None
    d_captured: Any = None


@overload
def attention(
    q: Any, k: Any, v: Any, *, partial: Literal[True] | tuple[Any, Any, Any], finish: Literal[False] = False,
    score_mod: Mod = None, mask_mod: Mod = None, captured: dict[str, Any] | None = None, **options: Unpack[Options],
) -> tuple[Any, Any, Any]: ...
@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse_low: Literal[True], return_lse: bool = False, score_mod: Mod = None,
    mask_mod: Mod = None, captured: dict[str, Any] | None = None, **options: Unpack[Options],
) -> tuple[Any, Any, Any]: ...
@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[True], return_lse_low: bool = False, score_mod: Mod = None,
    mask_mod: Mod = None, captured: dict[str, Any] | None = None, **options: Unpack[Options],
) -> tuple[Any, Any]: ...
@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: bool = False, return_lse_low: bool = False, score_mod: Mod = None,
    mask_mod: Mod = None, captured: dict[str, Any] | None = None, partial: Any = None, finish: bool = False,
    **options: Unpack[Options],
) -> Any: ...
@with_options
def attention(
    q: Any, k: Any, v: Any, *, return_lse: bool = False, return_lse_low: bool = False, score_mod: Mod = None,
    mask_mod: Mod = None, captured: dict[str, Any] | None = None, partial: Any = None, finish: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Exact attention: ``O = softmax(scale Q K^T + ...) V``, in memory linear in the length.

    Shapes, with Hq a multiple of Hkv (query head h reads KV head ``h * Hkv // Hq``)::

        q    [B, Sq, Hq, D]      packed: [Tq, Hq, D]   with cu_seqlens_q
        k    [B, Sk, Hkv, D]             [Tk, Hkv, D]  with cu_seqlens_k    paged: [pages, page_size, Hkv, D]
        v    [B, Sk, Hkv, Dv]            [Tk, Hkv, Dv]                             [pages, page_size, Hkv, Dv]
        o    [B, Sq, Hq, Dv]             [Tq, Hq, Dv]
        lse  [B, Hq, Sq] float32         [Hq, Tq] float32

    ``layout="bhsd"`` reads q, k, v and writes o in the layout of PyTorch's SDPA: [B, H, S, D], packed [H, T, D], pages
    [pages, Hkv, page_size, D].

    q, k and v share one dtype: float32, float16, bfloat16, or float64 (the slow reference, for checks); or, without
    gradients, k and v are an 8-bit cache under 16-bit q (float8_e4m3, float8_e5m2 or, on the CPU, int8), or q, k and
    v are all float8_e4m3 or float8_e5m2, and o is bfloat16. ``tessera.quantize`` makes 8-bit arrays with their scales.
    D is 1 .. 576 and Dv is 1 .. 512. Strides are arbitrary as long as the last dimension is contiguous. Arrays may be
    read-only; nothing is copied. They may be arrays of NumPy (bfloat16 and 8-bit floats by ml_dtypes), PyTorch, JAX (on
    the CPU), CuPy, or any other library with ``__dlpack__``, all on one device: the CPU, or a GPU, where the kernels
    run in the current stream of the framework.

    For query i and key j of one sequence, in this order::

        s = scale * (q_i . k_j);   s = softcap * tanh(s / softcap) if softcap > 0;   s += bias[b, h, i, j]
        s -= alibi_slopes[h] * |i + Sk - Sq - j|;   s = score_mod(s, b, h, i, j);   s = -inf where j is not visible
        lse_i = log sum_j exp(s_ij);   o_i = sum_j exp(s_ij - lse_i) v_j

    The sink joins only the sum of lse; dropout zeroes entries of the softmax after it. A query that sees no key has
    o = 0 and lse = -inf, as have rows of packed q that belong to no sequence.

    Options, by keyword only:
        score_mod, mask_mod: a program of one (query, key) pair: a new score from the score so far, and whether the key
            is visible. A text, "50 * tanh(s / 50) + bias[h, i - j + 512]" and "j <= q_pos && doc[b, i] == doc[b, j]"
            (docs/guide/score-programs.md describes the language), or a Python function, score_mod(score, b, h, q_idx,
            kv_idx) and mask_mod(b, h, q_idx, kv_idx), which is traced: operators, PyTorch's or NumPy's functions and
            those of `tessera.score`. Arrays that a function captures are read by index, and have gradients; numbers
            become scalars of the program.
        captured: {name: array or number}, what a text names.
        return_lse: return (o, lse) instead of o. The lse is a natural logarithm.
        return_lse_low: return (o, lse, lse_low). lse_low, float32, is the rounding error of lse: lse + lse_low has
            twice the digits, for `attention_backward` and `combine`.
        partial, finish: partial=True returns a partial result (o, lse, lse_low), o in float32, which loses nothing.
            Given to a call with other keys, partial=(o, lse, lse_low), it is merged with that call's, in place, and
            returned: exactly, so that keys may come in any number of parts. The last call has finish=True: its o is a
            new array of q's dtype, rounded once, and its sink, if any, counts for all. No gradient.
        place_q, place_k: (first, total), the place of the queries and keys in a whole of which they are a part: causal,
            window, ALiBi, dropout and score programs then mean the same as in the whole. bias and masks are those of
            the part. With dropout, the first key is a multiple of 32.
        places: int32 [B, 4], first query, queries, first key and keys of each sequence, instead.
        place_heads, total_heads_kv, first_sequence: (first, total) of the query heads, the KV heads of the whole (0: as
            many for each query head as here), and the number of the first sequence, for dropout and score programs.
        layout: "bshd", or "bhsd" if heads precede rows in q, k, v and o (and in their gradients).
        scale: 0, or 1e-18 .. 1e18 of either sign; None means 1 / sqrt(D).
        causal: key j is visible to query i if j <= i + Sk - Sq (the last query sees the last key).
        top_left: causal and window are measured from key i instead of key i + Sk - Sq.
        window: (left, right), keys visible on each side of the diagonal; -1 means all.
        softcap: 0 means none, or 1e-18 .. 1e18.
        bias: float32 or q's dtype, [B|1, Hq|1, Sq|1, Sk|1] or its last axes, broadcast as NumPy does.
        mask: bool, with the shape rules of bias; True = visible.
        block_mask, mask_block: bool, [B|1, Hq|1, ceil(Sq / bq), ceil(Sk / bk)], and (bq, bk) in queries and keys.
        alibi_slopes: float32 [Hq] or [B, Hq].
        sink: float32 [Hq], a logit.
        q_descale, k_descale, v_descale: float32 scales of 8-bit q, k, v, whose values are scale * code: [1], [Hkv],
            [B, Hkv] or, one for 128 tokens of a sequence, [B, ceil(S / 128), Hkv]; with pages in place of the last
            [pages, page_size, Hkv], one for a token. 1 if absent.
        dropout_p, dropout_seed, dropout_offset: probability 0 <= p < 1, and the key of Philox4x32-10. The same values
            drop the same entries in `attention_backward`, on any machine.
        dropout_state: int64 [2], seed and offset in one array instead of two numbers; read when the kernels run.
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1], sequence b is rows cu[b] .. cu[b + 1] of packed q, and of k and v.
        seqused_k: int32 [B], each sequence's number of keys.
        page_table: int32 [B, max_pages]; needs seqused_k. Alternatively, as CSR:
        page_indptr, page_indices: int32 [B + 1] and [N]; sequence b has pages page_indices[page_indptr[b]] up to
            page_indices[page_indptr[b + 1] - 1]. max_seqlen_k is the length of the longest sequence; without it, one
            sequence may have all N pages.
        causal_seqs: bool [B], True for causal sequences; replaces causal.
        tree_mask: int32 [B, Sq, W] or packed [Tq, W], for drafted tokens: bit t % 32 of word t / 32 of a query is set
            if it sees key Sk - Sq + t, t < 32 W. No gradient.
        prefix_groups, prefix_lens: int32 [G + 1] and [G]; the sequences prefix_groups[g] .. prefix_groups[g + 1] begin
            with the same prefix_lens[g] keys, in the same pages or in copies, which are read once. The result is the
            same. No gradient, and not with window, alibi_slopes, bias, mask, block_mask, top_left, dropout_p or
            batch_invariant.
        max_prefix_k, max_suffix_k: upper bounds of the keys of a prefix that are read once, and of a sequence's other
            keys. 0: unknown.
        max_seqlen_q, max_seqlen_k: upper bounds of a packed sequence's rows, required with bias or mask. 0: unknown.
        list_capacity: the most entries, of 4 bytes of the workspace, in the lists that a GPU makes of the blocks which
            the mask of a program shows; 0: the library chooses, at most 64 MiB or 64 entries a list. Where it is too
            small, the mask is evaluated in every block: slower, and the same result.
        batch_invariant: a sequence's bits do not depend on the other sequences of the batch.
        deterministic: affects only `attention_backward`.
        kernel: "auto", or the only kernel to consider, by its name in `tessera.plan`: on the CPU "tiled", "decode" or
            "reference", on a GPU for instance "fwd_sm90". `tessera --help` and the error for an unknown name list all.
        threads: 0 means all that this process may use. The number of threads never changes the result's bits.
        openmp: compute on the OpenMP threads that another library has started in this process, instead of Tessera's
            own. PyTorch tensors always do.

    Raises:
        tessera.Error: (a ValueError) a wrong shape, stride, dtype, device, option or index, in one line.
        TypeError: an unknown option; for another library's name (SDPA's is_causal), the message gives the name here.
    """
    like = framework_of(q)
    mods = {"score_mod": score_mod, "mask_mod": mask_mod, "captured": captured}
    if partial is not None or finish:
        results = _merged(q, k, v, partial, finish, mods, options)
        if not finish or return_lse_low:
            return results
        return results[:2] if return_lse else results[0]
    if like.attention is not None:
        options.pop("openmp", None)
        return like.attention(q, k, v, return_lse=return_lse, return_lse_low=return_lse_low, **mods, **options)
    if options or not type(q) is type(k) is type(v):
        check_arrays("q", q, {"k": k, "v": v, **options})
    try:
        shape = q.shape
        o = like.empty(shape[:-1] + v.shape[-1:], output_dtype(q))
        rows = shape[-3:-1] if options.get("layout") == "bhsd" else (shape[-2], shape[-3])
        lse, low = (
            like.empty((*shape[:-3], *rows), like.float32) if wanted else None
            for wanted in (return_lse or return_lse_low, return_lse_low)
        )
    except (AttributeError, IndexError, TypeError):
        o = lse = low = None  # the library reports the error
    if low is not None:
        options["lse_low"] = low
    if (bound := _bound(q, mods)) is not None:
        options.update(bound.options())
    if like.workspace is not None:
        options["workspace"] = like.workspace
    _core.forward(q, k, v, o, lse, **options)
    results = [x if like.finish is None else like.finish(x) for x in (o, lse, low) if x is not None]
    return tuple(results) if len(results) > 1 else results[0]


@with_options
def attention_backward(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    d_o: Any,
    *,
    d_lse: Any = None,
    lse_low: Any = None,
    grad_bias: bool = False,
    grad_sink: bool = False,
    grad_captured: bool | Sequence[str] = False,
    score_mod: Mod = None,
    mask_mod: Mod = None,
    captured: dict[str, Any] | None = None,
    **options: Unpack[Options],
) -> Gradients:
    """The gradients of `attention`, from its inputs, its o and lse, and the cotangent d_o of o (and d_lse of lse).

    With P = exp(S - lse), recomputed tile by tile::

        dV = P^T dO,   dS = P * (dO V^T - rowsum(dO * O) + d_lse),   dQ = scale * dS K,   dK = scale * dS^T Q

    The options must be those of the forward call. Paged keys and values are for inference and have no gradients.

    Args:
        o, lse: what ``attention(..., return_lse=True)`` returned.
        lse_low: what ``return_lse_low=True`` returned, or None. Without it the weights of a row sum to 1 within |lse|
            2^-24.
        d_o: with the shape and dtype of o. d_lse: float32, with the shape of lse, or None.
        grad_captured: names of arrays that score_mod and mask_mod capture, or True for all floating-point ones:
            d_captured is then {name: gradient}, each of its array's dtype.
        grad_bias, grad_sink: also compute d_bias (float32, with the shape of bias) and d_sink (float32 [Hq]).
        deterministic: the same bits every time (the CPU's kernels are always deterministic).

    Raises:
        tessera.Error: as for `attention`.
    """
    like = framework_of(q)
    mods = {"score_mod": score_mod, "mask_mod": mask_mod, "captured": captured}
    own = {"k": k, "v": v, "o": o, "lse": lse, "d_o": d_o, "d_lse": d_lse, "lse_low": lse_low}
    check_arrays("q", q, {**own, **options})
    if like.attention_backward is not None:
        options.pop("openmp", None)
        wanted = {"d_lse": d_lse, "lse_low": lse_low, "grad_bias": grad_bias, "grad_sink": grad_sink}
        wanted |= {"grad_captured": grad_captured, **mods}
        return Gradients(*like.attention_backward(q, k, v, o, lse, d_o, **wanted, **options))
    bound = _bound(q, mods)
    d_captured = _gradients_of_captured(bound, grad_captured, lambda x: like.empty(x.shape, x.dtype))
    if bound is not None:
        options.update(bound.options(), d_captured=[d_captured.get(name) for name in bound.names])
    if grad_bias:
        options["d_bias"] = d_bias = like.empty(_shape("bias", options), like.float32)
    if grad_sink:
        options["d_sink"] = d_sink = like.empty(_shape("sink", options), like.float32)
    try:
        outputs = [like.empty(twin.shape, twin.dtype) for twin in (q, k, v)]
    except (AttributeError, TypeError):
        outputs = [None, None, None]
    if like.workspace is not None:
        options["workspace"] = like.workspace
    _core.backward(q, k, v, o, lse, d_o, *outputs, d_lse=d_lse, lse_low=lse_low, **options)
    outputs += [d_bias if grad_bias else None, d_sink if grad_sink else None]
    if like.finish is not None:
        outputs = [x if x is None else like.finish(x) for x in outputs]
        d_captured = {name: like.finish(x) for name, x in d_captured.items()}
    return Gradients(*outputs, None if bound is None or grad_captured is False else bound.shaped(d_captured))


@with_options
def plan(
    q: Any, k: Any, v: Any, *, direction: str = "forward", as_dict: bool = False, score_mod: Mod = None,
    mask_mod: Mod = None, captured: dict[str, Any] | None = None, **options: Unpack[Options],
) -> Any:
    """Describes what `attention` (or, with direction "backward", `attention_backward`) would do with these arrays: the
    kernel and why, why each other candidate was refused, tiles, workspace, FLOPs, bytes moved. ``as_dict=True`` returns
    a dict.

    Only layouts matter: nothing is computed, and the arrays' data are not read.
    """
    check_arrays("q", q, {"k": k, "v": v, **options})
    bound = _bound(q, {"score_mod": score_mod, "mask_mod": mask_mod, "captured": captured})
    if bound is not None:
        options.update(bound.options())
    if is_torch(q):
        from tessera.torch.kernels import described, plain

        q, k, v = map(described, (q, k, v))
        options = {name: described(value) for name, value in options.items()}
        if bound is not None:
            options["captured"] = [described(plain(x)) for x in bound.arrays]
    if as_dict:
        return json.loads(_core.plan_json(direction, q, k, v, **options))
    return _core.plan(direction, q, k, v, **options)


@overload
def combine(
    o_parts: Any, lse_parts: Any, lse_low_parts: Any = None, *, return_lse_low: Literal[True], return_lse: bool = False
) -> tuple[Any, Any, Any]: ...
@overload
def combine(
    o_parts: Any, lse_parts: Any, lse_low_parts: Any = None, *, return_lse: Literal[True], return_lse_low: bool = False
) -> tuple[Any, Any]: ...
@overload
def combine(
    o_parts: Any, lse_parts: Any, lse_low_parts: Any = None, *, return_lse: bool = False, return_lse_low: bool = False
) -> Any: ...
def combine(
    o_parts: Any, lse_parts: Any, lse_low_parts: Any = None, *, return_lse: bool = False, return_lse_low: bool = False
) -> Any:
    """Merges N results over disjoint sets of keys into the result over all of them, exactly. With m = max_n LSE_n::

        LSE = m + log sum_n exp(LSE_n - m),   o = sum_n exp(LSE_n - LSE) o_n

    Args:
        o_parts: [N, B, S, H, Dv], float32, float16 or bfloat16.
        lse_parts: [N, B, H, S], float32, on the same device. Parts that saw no key (-inf) are skipped, whatever their o
            holds.
        lse_low_parts: the rounding error of lse_parts, with the same shape, or None.

    Returns:
        o [B, S, H, Dv]; (o, lse [B, H, S]) with return_lse, (o, lse, lse_low) with return_lse_low.
    """
    like = framework_of(o_parts, "o_parts")
    if like.combine is not None:
        return like.combine(o_parts, lse_parts, lse_low_parts, return_lse=return_lse, return_lse_low=return_lse_low)
    check_arrays("o_parts", o_parts, {"lse_parts": lse_parts, "lse_low_parts": lse_low_parts})
    try:
        o = like.empty(o_parts.shape[1:], o_parts.dtype)
        lse = like.empty(lse_parts.shape[1:], like.float32) if return_lse or return_lse_low else None
        low = like.empty(lse_parts.shape[1:], like.float32) if return_lse_low else None
    except (AttributeError, TypeError):
        o = lse = low = None
    _core.combine(o_parts, lse_parts, o, lse, lse_low_parts, low)
    results = [x if like.finish is None else like.finish(x) for x in (o, lse, low) if x is not None]
    return tuple(results) if len(results) > 1 else results[0]


def append(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    seqused_k: Any,
    *,
    cu_seqlens: Any = None,
    page_table: Any = None,
    q: Any = None,
    q_out: Any = None,
    cos: Any = None,
    sin: Any = None,
    positions_q: Any = None,
    positions_k: Any = None,
    dropped: Any = None,
    interleaved: bool = False,
    k_descale: Any = None,
    v_descale: Any = None,
    compute_scales: bool = False,
) -> None:
    """Writes new keys and values at each sequence's end in a cache and rotates q and the new keys (rotary position
    embedding), in one pass. No gradients.

    Args:
        k, v: [B, S, Hkv, D], [B, S, Hkv, Dv], or packed [T, Hkv, D], [T, Hkv, Dv]; unchanged.
        k_cache, v_cache: [B, Smax, Hkv, D | Dv], or with page_table [pages, page_size, Hkv, D | Dv], with any strides
            and a contiguous last axis. Written.
        seqused_k: int32 [B], keys of each sequence including the new ones, as `attention` expects it afterwards.
        cu_seqlens: int32 [B + 1]: k, v and q are packed; sequence b has tokens cu_seqlens[b] .. cu_seqlens[b + 1].
        page_table: int32 [B, max_pages].
        q, q_out: [B, Sq, Hq, D] or [T, Hq, D]. q is rotated into q_out, or in place.
        cos, sin: [R, rotary_dim / 2], float32 or k's dtype; columns of q and k from rotary_dim on are unchanged.
        positions_q, positions_k: int32 [B, S] or [T], the rows of cos and sin; by default a new key's position among
            its sequence's keys, and for query i that of new key i.
        dropped: int32 [1]; a GPU adds the number of tokens that were out of range and not written.
        interleaved: a pair is two neighbouring columns (GPT-J); otherwise its columns are rotary_dim / 2 apart
            (GPT-NeoX).
        k_descale, v_descale: float32 scales of a cache of float8_e4m3, float8_e5m2 or, on the CPU, int8, which stores
            value / scale, rounded to nearest, and saturates: [1], [Hkv] or [B, Hkv].
        compute_scales: with page_table; compute a scale for each new token and head, and write it to k_descale and
            v_descale, [pages, page_size, Hkv].

    Raises:
        tessera.Error: an argument is wrong or, on the CPU, out of range; nothing is then written.
    """
    tensors = dict(
        cu_seqlens=cu_seqlens, page_table=page_table, q=q, q_out=q_out, cos=cos, sin=sin, positions_q=positions_q,
        positions_k=positions_k, dropped=dropped, k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip
    check_arrays("k", k, {"v": v, "k_cache": k_cache, "v_cache": v_cache, "seqused_k": seqused_k, **tensors})
    run = _core.append
    if is_torch(k):
        from tessera.torch.cache import append as run
    run(k, v, k_cache, v_cache, seqused_k, **tensors, interleaved=interleaved, compute_scales=compute_scales)


def _merged(
    q: Any, k: Any, v: Any, partial: Any, finish: bool, mods: dict[str, Any], options: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """(o, lse, lse_low) of a call, merged with the partial result that it is given."""
    if partial is None:
        raise _core.Error("finish: True without partial, accepted with a partial result (o, lse, lse_low)")
    if partial is not True and not (isinstance(partial, tuple) and len(partial) == 3):
        raise _core.Error(f"partial: {type(partial).__name__}, accepted True and a tuple (o, lse, lse_low)")
    like = framework_of(q)
    if like.finish is not None:
        raise _core.Error("partial: given with JAX arrays, which nothing can be merged with in place")
    if options.get("layout", "bshd") != "bshd":
        raise _core.Error(f'partial: given with layout {options["layout"]!r}, accepted with "bshd"')
    written = None
    if is_torch(q):
        from tessera.torch.kernels import mark_written as written
        from tessera.torch.kernels import refuse_gradients

        given = {} if partial is True else dict(zip(("o", "lse", "lse_low"), partial))
        captured = {f"captured[{name!r}]": x for name, x in (mods["captured"] or {}).items()}
        refuse_gradients("a partial result", q=q, k=k, v=v, **given, **options, **captured)
    if partial is True:
        shape = q.shape
        o = like.empty(shape[:-1] + v.shape[-1:], like.float32 if str(q.dtype)[-7:] != "float64" else q.dtype)
        lse, low = (like.empty((*shape[:-3], shape[-2], shape[-3]), like.float32) for _ in range(2))
    else:
        o, lse, low = partial
        options["accumulate"] = 1
    check_arrays("q", q, {"k": k, "v": v, "o": o, "lse": lse, "lse_low": low, **options})
    if finish:
        if partial is not True:
            options["o_accum"] = o
        o = like.empty(o.shape, q.dtype)
    if (bound := _bound(q, mods)) is not None:
        options.update(bound.options())
    if like.workspace is not None:
        options["workspace"] = like.workspace
    _core.forward(q, k, v, o, lse, lse_low=low, **options)
    if written and partial is not True:
        written(o, lse, low)
    return o, lse, low


def _bound(q: Any, mods: dict[str, Any]) -> Bound | None:
    """The program of a call, whose arrays are of q's framework."""
    bound = bind(**mods)
    if bound is not None:
        for array in bound.arrays:
            check_arrays("q", q, {"captured": array})
    return bound


def _gradients_of_captured(
    bound: Bound | None, wanted: bool | Sequence[str], empty: Callable[[Any], Any]
) -> dict[str, Any]:
    """Arrays for the gradients that are wanted, by name."""
    if wanted is False:
        return {}
    if bound is None:
        raise _core.Error("grad_captured: given without score_mod and mask_mod, accepted with one of them")
    return {name: empty(bound.array(name)) for name in bound.differentiable(wanted)}


def _shape(name: str, options: dict[str, Any]) -> tuple[int, ...]:
    twin = options.get(name)
    if twin is None:
        raise _core.Error(f"grad_{name}: True without {name}, accepted only with it")
    return tuple(twin.shape)
