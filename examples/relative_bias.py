"""A learned relative position bias, in PyTorch: attention's weights depend on the distance alone, and training finds
the distances that matter. The bias is a score program's tensor; no bias matrix is made."""

import tessera.torch
import torch

torch.manual_seed(0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, HEADS, WIDTH, REACH = 96, 2, 16, 32
WANTED = (3, 17)  # what each head has to find: the value so many tokens earlier

# One number for each head and distance.
bias = torch.nn.Parameter(torch.zeros(HEADS, REACH, device=DEVICE))


def score_mod(score, b, h, q_idx, kv_idx):
    return score + bias[h, q_idx - kv_idx]


def mask_mod(b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx) & (q_idx - kv_idx < REACH)


optimizer = torch.optim.Adam([bias], lr=0.3)
silent = torch.zeros(8, LENGTH, HEADS, WIDTH, device=DEVICE)  # queries and keys say nothing: positions alone do
for step in range(60):
    v = torch.randn(8, LENGTH, HEADS, WIDTH, device=DEVICE)
    o = tessera.torch.attention(silent, silent, v, score_mod=score_mod, mask_mod=mask_mod)
    wanted = torch.stack([v[:, REACH - distance : LENGTH - distance, h] for h, distance in enumerate(WANTED)], 2)
    loss = (o[:, REACH:] - wanted).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step:2d}  loss {loss.item():.3f}")
found = bias.argmax(1).tolist()
print(f"step {step:2d}  loss {loss.item():.3f}; the largest biases are those of the distances {found}")
assert found == list(WANTED) and loss < 0.1
