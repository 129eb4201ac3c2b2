"""Errors of O and of the gradients in bfloat16, over those of attention with a float32 softmax whose P and dS are rounded once.

    errors.py name=LIBRARY ...       TESSERA_AMX=emulated TESSERA_ISA=amx_bf16 in the environment: AMX's tiles in plain C++

Relative RMS against float64, outputs rounded to bfloat16 in both.
"""

import ctypes as C
import os
import sys

import torch

from library import ab

BFLOAT16 = 2


def tensor(case, which, N, H, D):
    buffer = (C.c_uint8 * (N * H * D * 2))()
    ab.ab_output(case, which, buffer, len(buffer))
    return torch.frombuffer(buffer, dtype=torch.bfloat16).view(N, H, D).permute(1, 0, 2).double()


def rounded(x):
    return x.to(torch.bfloat16).double()


def attention(q, k, v, d_o, causal, once):
    """O, dQ, dK, dV; once: P and dS rounded to bfloat16 before their products, and O before delta."""
    r = rounded if once else (lambda x: x)
    scale = q.shape[-1] ** -0.5
    s = q @ k.transpose(1, 2) * scale
    if causal:
        s = s.masked_fill(torch.ones_like(s[0]).triu(1).bool(), -torch.inf)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    total = e.sum(-1, keepdim=True)
    o = r(r(e) @ v / total)
    p = e / total
    d_v = r(p).transpose(1, 2) @ d_o
    d_s = r(p * (d_o @ v.transpose(1, 2) - (o * d_o).sum(-1, keepdim=True)))
    return [r(x) for x in (o, d_s @ k * scale, d_s.transpose(1, 2) @ q * scale, d_v)]


def error(x, exact):
    return float((x - exact).norm() / exact.norm())


print("D,N,causal,build,isa," + ",".join(f"{x},{x}_over_rounded_once" for x in ("o", "d_q", "d_k", "d_v")))
for D in (40, 64, 128, 256):
    for N in (512, 1024):
        for causal in (0, 1):
            for name, path in (argument.split("=") for argument in sys.argv[1:]):
                H = 2
                case = ab.ab_case(1, BFLOAT16, 1, N, N, H, H, D, causal, -1, b"none", 1, 0)
                bound = ab.ab_bind(case, os.path.abspath(path).encode(), b"")
                q, k, v, d_o = (tensor(case, which, N, H, D) for which in (4, 5, 6, 7))
                mine = [tensor(case, which, N, H, D) for which in range(4)]
                exact, once = (attention(q, k, v, d_o, causal, x) for x in (False, True))
                errors = [(error(m, x), error(m, x) / error(o, x)) for m, o, x in zip(mine, once, exact)]
                print(f"{D},{N},{causal},{name},{ab.ab_isa(bound)}," + ",".join(f"{e:.3g},{f:.3f}" for e, f in errors), flush=True)
                ab.ab_unbind(bound)
                ab.ab_free(case)
