"""FlashAttention in 25 lines of NumPy: tiles, an online softmax, and a backward pass that computes P again from the
LSE.

One head: q, k, v, o and their gradients are [N, D], lse is [N, 1]. No array here is N x N.
"""

import numpy as np


def tile(q, k, m, n, b_m, b_n, causal):  # scores of queries m .. m + b_m and keys n .. n + b_n
    s = q[m : m + b_m] @ k[n : n + b_n].T / np.sqrt(q.shape[1])
    hidden = np.arange(n, n + s.shape[1]) > np.arange(m, m + s.shape[0])[:, None]
    return np.where(hidden, -np.inf, s) if causal else s

def forward(q, k, v, b_m=128, b_n=64, causal=False):
    o, lse = np.empty_like(q), np.empty((len(q), 1), q.dtype)
    for i in range(0, len(q), b_m):  # one tile of queries against all blocks of keys that it sees
        m, l, acc = -np.inf, 0, 0
        for j in range(0, i + b_m if causal else len(k), b_n):
            s = tile(q, k, i, j, b_m, b_n, causal)
            new_m = np.maximum(m, s.max(1, keepdims=True, initial=-np.inf))
            p, rescale = np.exp(s - new_m), np.exp(m - new_m)  # earlier sums are rescaled to the new maximum
            m, l, acc = new_m, rescale * l + p.sum(1, keepdims=True), rescale * acc + p @ v[j : j + b_n]
        o[i : i + b_m], lse[i : i + b_m] = acc / l, m + np.log(l)
    return o, lse

def backward(q, k, v, o, lse, d_o, b_m=128, b_n=64, causal=False):
    d_q, d_k, d_v, delta = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), (d_o * o).sum(1, keepdims=True)
    for j in range(0, len(k), b_n):
        for i in range(j // b_m * b_m if causal else 0, len(q), b_m):
            rows, keys = slice(i, i + b_m), slice(j, j + b_n)
            p = np.exp(tile(q, k, i, j, b_m, b_n, causal) - lse[rows])  # the softmax itself, without a second pass
            d_v[keys] += p.T @ d_o[rows]
            d_s = p * (d_o[rows] @ v[keys].T - delta[rows]) / np.sqrt(q.shape[1])
            d_q[rows], d_k[keys] = d_q[rows] + d_s @ k[keys], d_k[keys] + d_s.T @ q[rows]
    return d_q, d_k, d_v


if __name__ == "__main__":
    random = np.random.default_rng(0)
    N, D = 1000, 64
    q, k, v, d_o = random.standard_normal((4, N, D))
    o, lse = forward(q, k, v, causal=True)
    d_q, d_k, d_v = backward(q, k, v, o, lse, d_o, causal=True)

    s = np.where(np.triu(np.ones((N, N), bool), 1), -np.inf, q @ k.T / np.sqrt(D))  # the three lines of the textbook
    p = np.exp(s - s.max(1, keepdims=True))
    expected = p / p.sum(1, keepdims=True) @ v
    print(f"O: largest difference from softmax(Q K^T / sqrt(D)) V: {abs(o - expected).max():.1e}")

    step = 1e-4 * random.standard_normal((3, N, D))  # a small change of q, k and v, and its effect on sum(O dO)
    moved = [(forward(q + h * step[0], k + h * step[1], v + h * step[2], causal=True)[0] * d_o).sum() for h in (1, -1)]
    measured, predicted = (moved[0] - moved[1]) / 2, (step * [d_q, d_k, d_v]).sum()
    print(f"gradients: a small step changes sum(O dO) by {measured:.8f}, and they say {predicted:.8f}")
    assert abs(o - expected).max() < 1e-12 and abs(measured - predicted) < 1e-6 * abs(measured)
