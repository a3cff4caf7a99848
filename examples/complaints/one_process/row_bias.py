"""The bias behind the all-reduce is added once for each rank

EleutherAI/gpt-neox#962 (open): two branches of a block are summed before one all-reduce, with their biases, so a bias
counts once for each rank. PaddlePaddle/Paddle#35186 (merged) mends the same in a row-parallel layer. The usual cure, a
bias divided by tp, is a trap, too: in pytorch/torchtitan#4332 (closed) its gradient was divided as well.

A bias leaves its product before anything is cut, and is added behind the sum.
"""

import torch
from torch import nn

import autotp

model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

report = autotp.verify(model, tp=4, example_inputs=torch.ones(3, 8))
assert [str(cut.layout) for cut in report.plan.cuts if cut.name == "2.weight"] == ["[8, 32@tp]"]
assert [gradient.error < 1e-12 for gradient in report.gradients if gradient.name == "2.bias"] == [True]
assert report.ok, report
