"""The ranks of one model get different batches

pytorch/pytorch#119343 (open): tensor parallelism with other random inputs on each rank ended in a communication error,
and the user asks for a message. A maintainer answers that a rank cannot know the others' inputs without communication,
so nothing is checked.

In the first two calls of each kind the ranks compare checksums of their inputs; `check_inputs="always"` compares in
each call. Without it, a difference in a later call is not noticed.
"""

import torch
import torch.distributed as dist
from torch import nn

import autotp

mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
model = autotp.parallelize(mlp, example_inputs=torch.ones(3, 8))

message = "no error"
try:
    model(torch.ones(3, 8) * dist.get_rank())  # as a DistributedSampler gives them
except autotp.Error as error:
    message = str(error)
assert message == (
    "Sequential.forward: tp rank 1 got other inputs than rank 0\n"
    "  try      the same batch for all ranks of one model: no DistributedSampler, one seed for shuffling"
)
