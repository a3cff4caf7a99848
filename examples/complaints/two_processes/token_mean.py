"""The mean of the replicas' means is not the mean

pytorch/torchtitan#1842 (closed, mended by pytorch/torchtitan#2206): each rank divides by its own number of tokens that
count, and gradients are averaged over ranks. So with padding, a token of a short row counts more than others.
huggingface/transformers#34242 (closed, mended by huggingface/transformers#34373) reports it of Trainer.

A mean in the model's loss becomes a sum over the count of the whole batch, which the replicas exchange before the step.
A loss in which autotp sees no such mean is refused.
"""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autotp


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), labels.flatten())


torch.manual_seed(0)
alone = Model().double()
trainer = autotp.distribute(copy.deepcopy(alone), dp=2)

tokens = torch.arange(16).view(2, 8)
labels = tokens + 20
labels[0, 1:] = -100  # The first replica has one token to learn, the second has eight.
mine = slice(dist.get_rank(), dist.get_rank() + 1)
loss = trainer.step(tokens[mine], labels[mine])

expected = alone(tokens, labels)
expected.backward()
torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
for found, whole in zip(trainer.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(found.grad, whole.grad, rtol=1e-9, atol=1e-12)
