"""A small causal transformer learns to copy, with Tessera's attention in PyTorch's autograd."""

import tessera.torch
import torch
from torch import nn

torch.manual_seed(0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, LENGTH, WIDTH, HEADS = 16, 32, 64, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)  # each [B, S, H, D]
        x = x + self.out(tessera.torch.attention(q, k, v, causal=True).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.blocks(self.tokens(tokens) + self.positions.weight))


model = Model().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
half = LENGTH // 2
for step in range(80):
    words = torch.randint(VOCABULARY, (32, half), device=DEVICE)
    tokens = torch.cat([words, words], 1)  # the second half repeats the first
    logits = model(tokens)[:, half - 1 : -1]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step:3d}  loss {loss.item():.3f}")
print(f"step {step:3d}  loss {loss.item():.3f} (guessing: {torch.tensor(VOCABULARY).log():.3f})")
assert loss < 1.0
