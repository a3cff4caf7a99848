"""Clipping gradients fails, or takes a wrong norm

meta-pytorch/torchtune#2420 (open): `clip_grad_norm_` fails under tensor parallelism. huggingface/accelerate#4219
(merged) separates plain tensors from DTensors, which torch's function cannot take together. NVIDIA-NeMo/RL#3788 (open):
a sum over the ranks counts gradients that all ranks hold once for each.

torch's own function takes the norm of the whole gradient: parts are summed over the ranks, and what all ranks hold
counts once.
"""

import copy

import torch
from torch import nn

import autotp

torch.manual_seed(0)
alone = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).double()
x = torch.rand(3, 8, dtype=torch.float64)
model = autotp.parallelize(copy.deepcopy(alone), example_inputs=x)

norms = []
for one in (alone, model):
    one(x).square().sum().backward()
    norms.append(torch.nn.utils.clip_grad_norm_(one.parameters(), max_norm=0.1))
torch.testing.assert_close(norms[1], norms[0], rtol=1e-12, atol=0)
for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(autotp.gather(mine.grad), whole.grad, rtol=1e-9, atol=1e-12)
