"""Sequence parallelism: lengths that do not divide, and gradients of norms that nobody sums

pytorch/torchtitan#1306 (open): if the length does not divide by tp, the parts around embeddings and norms have wrong
shapes, without a word; pytorch/torchtitan#1312 (merged) makes it an error. NVIDIA/TransformerEngine#435 (closed): a
rank's norm sees a part of the sequence, and the caller has to sum the gradients of its weight over the ranks.

Any length is cut, and the sums are part of each rank's graph. Here seven tokens are on four ranks.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autotp

config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=64, num_attention_heads=4)
model = LlamaForCausalLM(config)
tokens = torch.arange(14).view(2, 7)

report = autotp.verify(model, 4, sequence_parallel=True, example_inputs={"input_ids": tokens, "labels": tokens})
assert report.plan.along_sequence  # the number of operators that are cut along it
assert max(gradient.error for gradient in report.gradients if "norm" in gradient.name) < 1e-12
assert report.ok, report
