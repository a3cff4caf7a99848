"""A checkpoint of one layout is read by another, with its optimizer

huggingface/transformers#48569 (open): with transformers' tensor parallelism and Trainer, saving waits without end,
resuming fails on shapes, and the optimizer's state comes back wrong without a word. huggingface/nanotron#106 (closed)
could not go on with another tp.

Any layout reads a checkpoint of any other, with the optimizer's moments. Here two steps run with tp=2, and two with
pp=2. Random states come back only in the same layout.
"""

import copy
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import autotp

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64, num_attention_heads=4,
    tie_word_embeddings=True,
)  # fmt: skip
model = LlamaForCausalLM(config)
tokens, folder = torch.arange(16).view(2, 8), [tempfile.mkdtemp()]


def two_steps(step: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(2):
        losses.append(step(tokens, labels=tokens).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def alone(tokens: Tensor, labels: Tensor) -> Tensor:
    loss = model(tokens, labels=labels).loss
    loss.backward()
    return loss


first = autotp.distribute(copy.deepcopy(model), tp=2, microbatches=2)
dist.broadcast_object_list(folder)  # the first rank's, for all
optimizer = torch.optim.AdamW(first.parameters(), lr=0.01)
found = two_steps(first.step, optimizer)
autotp.save_checkpoint(folder[0], first, optimizer, first.steps)

then = autotp.distribute(copy.deepcopy(model), pp=2, microbatches=2)
optimizer = torch.optim.AdamW(then.parameters(), lr=0.01)
assert autotp.load_checkpoint(folder[0], then, optimizer) == 2
found += two_steps(then.step, optimizer)

optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
expected = two_steps(alone, optimizer) + two_steps(alone, optimizer)
torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=0)
