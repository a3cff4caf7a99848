"""There are fewer key/value heads than ranks

pytorch/torchtitan#2574 (open): Qwen3.5 MoE has two key/value heads. With more ranks, each gets a fraction of a head,
and a reshape in attention fails. torchtitan has since refused this (pytorch/torchtitan#2577, merged); Megatron-Core
copies the heads (pytorch/torchtitan#4016).

Ranks that share a head hold the same copy of it, and the gradients of the copies are summed. Keys and values stay whole
where there is one head, or where the numbers of heads and ranks have no common factor (2 on 3).
"""

from transformers import Qwen3Config, Qwen3ForCausalLM

import autotp

config = Qwen3Config(
    hidden_size=64, intermediate_size=96, num_hidden_layers=1, vocab_size=64, num_attention_heads=8,
    num_key_value_heads=2, head_dim=8,
)  # fmt: skip
model = Qwen3ForCausalLM(config)

report = autotp.verify(model, tp=4)
(k_proj,) = (cut.layout for cut in report.plan.cuts if cut.name.endswith("k_proj.weight"))
assert k_proj.pieces == (((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),))  # the rows of each rank: one whole head
assert report.ok, report
