"""Score programs in every layout and beside every option of the CPU's kernels, against the float64 reference."""

import numpy as np
import pytest

import tessera

HQ, D, DV = 4, 24, 40
SCORES = {
    "": (),
    "1.5 * s + table[h, i - j + 200]": ("table",),
    "c * tanh(s / c) - slope[h_kv] * abs(q_pos - j)": ("slope", "c"),
    "doc[b, i] == doc[b, j] ? s + key[b, j] : 0.5 * s - query[h, i]": ("doc", "key", "query"),
    "s * gain[] - log(1.0 + abs(i - j)) + (j % 3 == 0 ? key[b, j] : 0.0)": ("gain", "key"),
}
MASKS = {
    "": (),
    "j <= q_pos && doc[b, i] == doc[b, j]": ("doc",),
    "j < 4 || (q_pos - j < 19 && q_pos >= j)": (),
    "key[b, j] > -0.8 && (i + j) % 5 != 1": ("key",),
}


def draw(seed):
    """A call in float32: tensors, the options of its layout, what programs may name."""
    random = np.random.default_rng(seed)
    normal = lambda *shape: random.standard_normal(shape).astype(np.float32)  # noqa: E731
    hkv, batch = int(random.choice([1, 2, 4])), int(random.integers(1, 4))
    lengths_q = random.integers(0, 80, batch) if random.random() < 0.7 else random.integers(1, 4, batch)
    lengths_k = random.integers(0, 150, batch)
    most_q, most_k = max(1, int(lengths_q.max())), max(1, int(lengths_k.max()))
    offsets = lambda lengths: np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)  # noqa: E731
    layout = random.choice(["dense", "lengths", "packed", "pages"])
    given = {}
    if layout == "packed":
        q, given["cu_seqlens_q"] = normal(int(lengths_q.sum()) + 3, HQ, D), offsets(lengths_q)
        rows, given["cu_seqlens_k"] = (int(lengths_k.sum()) + 2,), offsets(lengths_k)
    else:
        q, rows = normal(batch, most_q, HQ, D), (batch, most_k)
    if layout in ("lengths", "pages"):
        given["seqused_k"] = lengths_k.astype(np.int32)
    if layout == "pages":
        page, columns = 16, -(-most_k // 16)
        given["page_table"] = random.permutation(batch * columns).reshape(batch, columns).astype(np.int32)
        rows = (batch * columns, page)
    k, v = normal(*rows, hkv, D), normal(*rows, hkv, DV)
    if layout in ("lengths", "pages"):  # what is past a sequence's end is never read
        unused = np.arange(most_k)[None] >= lengths_k[:, None]
        if layout == "lengths":
            k[unused], v[unused] = np.nan, np.inf
        else:
            b, j = np.nonzero(unused)
            pages = given["page_table"][b, j // page], j % page
            k[pages], v[pages] = np.nan, np.inf
    named = {
        "table": normal(HQ, 512), "slope": np.abs(normal(hkv)), "c": 3.0, "gain": np.array(0.75, np.float32),
        "doc": random.integers(0, 3, (batch, 160)).astype(np.int16), "key": normal(batch, 160),
        "query": normal(HQ, 160),
    }  # fmt: skip
    for name, value in {
        "causal": True, "window": (40, 7), "softcap": 4.0, "sink": normal(HQ), "dropout_p": 0.3,
        "alibi_slopes": normal(HQ) / 8, "bias": normal(1, HQ, 1, most_k),
    }.items():  # fmt: skip
        if random.random() < 0.2 and not (name == "bias" and layout in ("packed", "pages")):
            given[name] = value
    if "dropout_p" in given:
        given["dropout_seed"] = seed
    score, mask = random.choice(list(SCORES)), random.choice(list(MASKS))
    names = {*SCORES[score], *MASKS[mask]}
    given.update(
        score_mod=str(score) or None, mask_mod=str(mask) or None, captured={n: named[n] for n in names} or None
    )
    return layout, q, k, v, given


# Scores are below 64 here, and a float32 score is off by 2^-24 of that: the weight of its exponential by 4e-6.
OUTPUT, GRADIENT = 8e-6, 3e-5


def error(found, expected):
    """The largest difference, as a share of the largest number, or of 1."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))  # infinite LSEs
    scale = max(1.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0)))
    return float(np.abs(np.where(same, 0, found - np.where(same, 0, expected))).max(initial=0)) / scale


@pytest.mark.parametrize("seed", range(160))
def test_kernels_are_the_reference(seed):
    layout, q, k, v, given = draw(seed)
    if not (given["score_mod"] or given["mask_mod"]):
        given["mask_mod"] = "j <= q_pos"
    wide = {"kernel": "reference", **given}
    wide_q, wide_k, wide_v = (x.astype(np.float64) for x in (q, k, v))
    if "bias" in given:
        wide["bias"] = given["bias"].astype(np.float32)
    expected, expected_lse = tessera.attention(wide_q, wide_k, wide_v, return_lse=True, **wide)
    for threads in (1, 3):
        o, lse = tessera.attention(q, k, v, return_lse=True, threads=threads, **given)
        assert error(o, expected) < OUTPUT and error(lse, expected_lse) < OUTPUT, (layout, given)
    if layout == "pages":
        return
    d_o = np.sin(np.arange(o.size)).astype(np.float32).reshape(o.shape)
    d_lse = np.cos(np.where(np.isfinite(lse), lse, np.pi / 2)).astype(np.float32)
    wanted = bool(given["captured"]) and any(np.asarray(x).dtype == np.float32 for x in given["captured"].values())
    gradients = {"d_lse": d_lse, "grad_captured": wanted}
    reference = tessera.attention_backward(
        wide_q, wide_k, wide_v, expected, expected_lse, d_o.astype(np.float64), **gradients, **wide
    )
    runs = [
        tessera.attention_backward(q, k, v, o, lse, d_o, threads=threads, **gradients, **given) for threads in (1, 3)
    ]
    for name in ("d_q", "d_k", "d_v"):
        assert error(getattr(runs[0], name), getattr(reference, name)) < GRADIENT, (name, layout, given)
    for name, gradient in (reference.d_captured or {}).items():
        assert error(runs[0].d_captured[name], gradient) < GRADIENT, (name, layout, given)
        assert np.array_equal(runs[0].d_captured[name], runs[1].d_captured[name]), "they do not depend on the threads"
