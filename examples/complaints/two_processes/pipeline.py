"""A pipeline of a Hugging Face model, without surgery

pytorch/pytorch#184361 (open): torch's own `pipeline` fails on every model of transformers that uses rotary positions.
pytorch/PiPPy#1147 (open) cuts a Llama by hand, by deleting layers and the embedding. NVIDIA/Megatron-LM#656 (closed):
in a pipeline, the copies of a tied head drifted apart.

The model is the same unedited class. Each stage computes the rotary tables and masks that it reads, and the gradients
of a tied head are summed over its two stages. `distribute` refuses more models than `parallelize`: those whose rows
depend on other rows, or whose `forward` sets attributes.
"""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autotp

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64, num_attention_heads=4,
    tie_word_embeddings=True,
)  # fmt: skip
alone = LlamaForCausalLM(config)
trainer = autotp.distribute(copy.deepcopy(alone), pp=2, microbatches=2)
optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (trainer, alone)]

tokens = torch.arange(16).view(2, 8)
for _ in range(3):
    loss, expected = trainer.step(tokens, labels=tokens), alone(tokens, labels=tokens).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
assert sum(1 for _ in trainer.parameters()) < sum(1 for _ in alone.parameters())
