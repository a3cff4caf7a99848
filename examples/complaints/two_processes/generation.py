"""Sampling gives each rank another text

huggingface/transformers#36634 (open): with `tp_plan`, each rank draws its own next token. In March 2025 a maintainer
answers that `generate` is not yet compatible with tensor parallelism. NVIDIA/TensorRT-LLM#1767 (closed): the first rank
stops at the end token, and the others wait without end.

The first rank's random state decides: the text is that of one device, whatever the seeds of the others. Each token is
chosen from logits that stay cut. Every rank must call `generate`.
"""

import copy

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import autotp

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=64, num_attention_heads=4, eos_token_id=2,
)  # fmt: skip
alone = LlamaForCausalLM(config).eval()
model = autotp.parallelize(copy.deepcopy(alone))

texts = []
for one in (alone, model):
    torch.manual_seed(5 if one is alone else 5 + dist.get_rank())
    texts.append(one.generate(torch.tensor([[1, 5, 9]]), do_sample=True, temperature=1.5, max_new_tokens=20))
assert torch.equal(texts[1], texts[0])
