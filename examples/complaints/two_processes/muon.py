"""Muon orthogonalizes each rank's part of a matrix

deepspeedai/DeepSpeed#8437 (open): the gradients of tp=1 and tp=2 agree to 7e-7, and the updates differ by 39%, because
the orthogonalized part of a matrix is not the part of the orthogonalized matrix. Nothing fails. Megatron-LM computes
with whole matrices (NVIDIA/Megatron-LM#6720).

A cut parameter behaves as the whole matrix to an optimizer, too, also to one that autotp does not know. Each rank then
orthogonalizes every matrix. `autotp.whole_matrices(torch.optim.Muon)` shares this work: each matrix is stepped on one
rank.
"""

import copy

import torch
from torch import nn

import autotp

torch.manual_seed(0)
mlp = nn.Sequential(nn.Linear(8, 32, bias=False), nn.GELU(), nn.Linear(32, 8, bias=False))
alone = copy.deepcopy(mlp)
model = autotp.parallelize(mlp, example_inputs=torch.ones(3, 8))
assert model.layouts["0.weight"].lengths() == [16, 16]
optimizers: list[type[torch.optim.Muon]] = [torch.optim.Muon, autotp.whole_matrices(torch.optim.Muon)]

for step, kind in enumerate(optimizers):
    for one, optimizer in ((alone, torch.optim.Muon), (model, kind)):
        one.zero_grad()
        one(torch.linspace(-1, 1 + step, 24).view(3, 8)).square().sum().backward()
        optimizer(one.parameters()).step()
    for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-2, atol=1e-5)
