"""Parts of a problem with their places in the whole, and partial results: together they are the whole."""

import numpy as np
import pytest

import tessera

B, HQ, HKV, D = 2, 4, 2, 32


def draw(seed, sq, sk, dtype=np.float32):
    random = np.random.default_rng(seed)
    shapes = ((B, sq, HQ, D), (B, sk, HKV, D), (B, sk, HKV, D))
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


def ranges(random, length):
    cuts = sorted({0, length, *(32 * int(n) for n in random.integers(1, max(2, length // 32), 3) if 32 * n < length)})
    return [slice(a, b) for a, b in zip(cuts, cuts[1:])]


def by_parts(seed, q, k, v, sink=None, **options):
    """o and lse of the whole, from a call for each pair of a range of queries and a range of keys."""
    random = np.random.default_rng(seed)
    sq, sk = q.shape[1], k.shape[1]
    keys = ranges(random, sk)
    random.shuffle(keys)
    o, lse = [], []
    for rows in ranges(random, sq):
        partial = True
        for n, columns in enumerate(keys):
            last = n == len(keys) - 1
            partial = tessera.attention(
                q[:, rows], k[:, columns], v[:, columns], partial=partial, finish=last, return_lse_low=True,
                place_q=(rows.start, sq), place_k=(columns.start, sk), **options, **({"sink": sink} if last else {}),
            )  # fmt: skip
        o.append(partial[0])
        lse.append(partial[1])
    return np.concatenate(o, 1), np.concatenate(lse, 2)


@pytest.mark.parametrize("options", [
    {"causal": True}, {"causal": True, "top_left": True}, {"window": (40, 17)}, {"causal": True, "sink": True},
    {"alibi_slopes": np.linspace(0.1, 0.9, HQ, dtype=np.float32), "window": (-1, 30)},
    {"dropout_p": 0.25, "dropout_seed": 11, "dropout_offset": 3, "causal": True},
    {"score_mod": "s - 0.01 * abs(i - j) + 0.001 * len_q - (b + 2 * h - h_kv) * 0.1", "mask_mod": "j <= q_pos + 3"},
    {"score_mod": "s + table[i, j]", "mask_mod": "(i // 16 + j // 16) % 3 != 1"},
])
def test_parts_are_the_whole(options):
    q, k, v = draw(1, 150, 210)
    options = dict(options)
    if "table" in options.get("score_mod", ""):
        options["captured"] = {"table": np.random.default_rng(2).standard_normal((150, 210)).astype(np.float32)}
    if options.pop("sink", False):
        options["sink"] = np.linspace(-1, 2, HQ, dtype=np.float32)
    whole = tessera.attention(q, k, v, return_lse=True, **options)
    for seed in range(3):
        for ours, expected in zip(by_parts(seed, q, k, v, **options), whole):
            np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-5)


def test_a_partial_result_of_16_bits_loses_nothing():
    """The error of many parts in float16 is that of one call."""
    q, k, v = draw(3, 96, 512, np.float16)
    exact = tessera.attention(*(x.astype(np.float64) for x in (q, k, v)))
    rms = lambda o: np.sqrt(np.mean((o.astype(np.float64) - exact) ** 2))  # noqa: E731
    one = rms(tessera.attention(q, k, v))
    partial = True
    for first in range(0, 512, 32):
        partial = tessera.attention(q, k[:, first : first + 32], v[:, first : first + 32], partial=partial)
        assert partial[0].dtype == np.float32
    assert rms(partial[0].astype(np.float16)) <= 1.02 * one


def test_each_sequence_has_its_own_place():
    q, k, v = draw(4, 40, 64)
    slopes = np.linspace(0.1, 0.9, HQ, dtype=np.float32)
    places = np.array([[64, 200, 32, 180], [0, 40, 0, 64]], np.int32)
    options = {"causal": True, "alibi_slopes": slopes, "dropout_p": 0.3, "dropout_seed": 5}
    together = tessera.attention(q, k, v, places=places, **options)
    for b, (first_q, total_q, first_k, total_k) in enumerate(places.tolist()):
        one = slice(b, b + 1)
        alone = tessera.attention(
            q[one], k[one], v[one], place_q=(first_q, total_q), place_k=(first_k, total_k), first_sequence=b, **options
        )
        np.testing.assert_array_equal(together[one], alone)


def test_heads_of_the_whole():
    """Ranks that divide the heads compute what one call computes, with more ranks than KV heads, too."""
    q, k, v = draw(5, 40, 64)
    options = {"dropout_p": 0.3, "dropout_seed": 5, "score_mod": "s - 0.2 * h + 0.1 * h_kv"}
    whole = tessera.attention(q, k, v, **options)
    for head in range(HQ):
        kv = head * HKV // HQ
        one = tessera.attention(
            q[:, :, head : head + 1], k[:, :, kv : kv + 1], v[:, :, kv : kv + 1], place_heads=(head, HQ),
            total_heads_kv=HKV, **options,
        )  # fmt: skip
        np.testing.assert_array_equal(one, whole[:, :, head : head + 1])


@pytest.mark.parametrize("wrong, words", [
    ({"place_q": (10, 30), "place_k": (0, 64)}, "total_q: 30 with first_q 10, accepted at least 50"),
    ({"place_q": (0, 40)}, "total_k: 0"),
    ({"place_q": (0, 40), "place_k": (40, 200), "dropout_p": 0.5}, "first_k: 40 with dropout_p"),
    ({"place_heads": (2, 5)}, "total_heads: 5 with first_head 2, accepted at least 6"),
    ({"place_heads": (1, 8)}, "first_head: 1"),
    ({"place_heads": (2, 8), "total_heads_kv": 3}, "total_heads_kv: 3"),
    ({"places": np.array([[0, 40, 0, 64], [8, 40, 0, 64]], np.int32)}, "places[1, 1]: 40, accepted at least 48"),
    ({"places": np.zeros((2, 3), np.int32)}, "places: shape [2, 3]"),
    ({"finish": True}, "finish: True without partial"),
    ({"partial": 1}, "partial: int"),
])  # fmt: skip
def test_errors(wrong, words):
    q, k, v = draw(6, 40, 64)
    with pytest.raises(tessera.Error) as error:
        tessera.attention(q, k, v, **wrong)
    assert words in str(error.value)


def test_a_partial_result_is_float32():
    q, k, v = draw(7, 16, 32, np.float16)
    o, lse, low = tessera.attention(q, k, v, partial=True)
    with pytest.raises(tessera.Error, match="o: dtype float16 with accumulate, accepted float32"):
        tessera.attention(q, k, v, partial=(o.astype(np.float16), lse, low))
