"""Muon orthogonalizes each rank's part of a matrix

deepspeedai/DeepSpeed#8437 (open): the gradients of tp=1 and tp=2 agree to 7e-7, and the updates differ by 39%, because
the orthogonalized part of a matrix is not the part of the orthogonalized matrix. Nothing fails, and the training
depends on tp. Megatron-LM computes with whole matrices (NVIDIA/Megatron-LM#6720).

Refused: autotp does not compute Muon on parameters that are cut. It knows such optimizers by their names, and takes one
of an unknown name to work element by element.
"""

import torch
from torch import nn

import autotp

mlp = nn.Sequential(nn.Linear(8, 32, bias=False), nn.GELU(), nn.Linear(32, 8, bias=False))
model = autotp.parallelize(mlp, example_inputs=torch.ones(3, 8))
optimizer = torch.optim.Muon(model.parameters())

model(torch.ones(3, 8)).sum().backward()
message = "no error"
try:
    optimizer.step()
except autotp.Error as error:
    message = str(error)
assert message == (
    "Muon.step: each rank has a part of `0.weight`, and this optimizer is not elementwise\n"
    "  try      AdamW, SGD, Lion or the like for parameters that are cut (`model.layouts` lists them)"
)
