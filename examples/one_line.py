"""Makes an ordinary GPT tensor-parallel with one line, and compares a training step with one device.

    python examples/one_line.py                          # a world of one
    torchrun --nproc-per-node 2 examples/one_line.py     # the same numbers on two processes

The plan that the script prints is for eight processes.
"""

import copy

import torch
from torch import nn

import autotp
from autotp.models.gpt import GPT, GPTConfig


def losses(model: nn.Module) -> tuple[float, float]:
    """Returns the loss before and after one step of training."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(1000, (2, 4, 64), generator=generator).to(next(model.parameters()).device)
    optimizer = torch.optim.AdamW(model.parameters())
    before = model(tokens, labels)
    before.backward()
    optimizer.step()
    return before.item(), model(tokens, labels).item()


torch.manual_seed(0)
model: nn.Module = GPT(GPTConfig(block_size=64, vocab_size=1000, n_layer=2, n_head=8, n_embd=128, dropout=0.0))
plan = autotp.explain(model, tp=8)  # Needs no processes, and does not change the model.
alone = losses(copy.deepcopy(model))

model = autotp.parallelize(model)  # The one line: cuts the model over all of torchrun's processes.

together = losses(model)
if autotp.is_first_rank():
    print(plan)
    print(f"one device:      loss {alone[0]:.5f}, after a step {alone[1]:.5f}")
    print(f"tensor-parallel: loss {together[0]:.5f}, after a step {together[1]:.5f}")
assert all(abs(a - b) < 1e-4 for a, b in zip(alone, together, strict=True))
