"""A model that is initialised in parts is another model

pytorch/pytorch#140301 (open): DTensor draws the numbers of one device only if the size of the tensor is a multiple of
the size of the generator's pool, which hardly any layer's is. So a sharded run starts from other weights than one
device.

A model on `meta` is initialised by its own initialisers, one module at a time, and each rank keeps its part: the
weights are those of one device, bit for bit. A constructor that draws numbers outside of `reset_parameters` is refused.
"""

import torch
from torch import nn

import autotp


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 33), nn.GELU(), nn.Linear(33, 8))


alone = build()
with torch.device("meta"):
    model = build()
model = autotp.parallelize(model, example_inputs=torch.ones(3, 8), device="cpu")

assert model.layouts["0.weight"].lengths() == [17, 16]
for name, whole in alone.named_parameters():
    assert torch.equal(autotp.gather(model.get_parameter(name)), whole)
