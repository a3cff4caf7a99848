"""Muon orthogonalizes each rank's part of a matrix

deepspeedai/DeepSpeed#8437 (open): the gradients of tp=1 and tp=2 agree to 7e-7, and the updates differ by 39%, because
the orthogonalized part of a matrix is not the part of the orthogonalized matrix. Nothing fails, and the training
depends on tp. Megatron-LM computes with whole matrices (NVIDIA/Megatron-LM#6720).

On parts Muon is refused: autotp knows such optimizers by their names, and takes one of an unknown name to work element
by element. `autotp.whole_matrices(torch.optim.Muon)` steps whole matrices, each on one rank: the step is one device's.
"""

import copy

import torch
from torch import nn

import autotp

torch.manual_seed(0)
mlp = nn.Sequential(nn.Linear(8, 32, bias=False), nn.GELU(), nn.Linear(32, 8, bias=False))
alone = copy.deepcopy(mlp)
model = autotp.parallelize(mlp, example_inputs=torch.ones(3, 8))
optimizer = torch.optim.Muon(model.parameters())

for one in (alone, model):
    one(torch.linspace(-1, 1, 24).view(3, 8)).square().sum().backward()
message = "no error"
try:
    optimizer.step()
except autotp.Error as error:
    message = str(error)
assert message == (
    "Muon.step: each rank has a part of `0.weight`, and this optimizer is not elementwise\n"
    "  try      autotp.whole_matrices(Muon)(parameters, ...), which steps each whole matrix on one rank\n"
    "  or       AdamW, SGD, Lion or the like for parameters that are cut (`model.layouts` lists them)"
)

torch.optim.Muon(alone.parameters()).step()
autotp.whole_matrices(torch.optim.Muon)(model.parameters()).step()
for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(autotp.gather(mine), whole, rtol=1e-2, atol=1e-5)
