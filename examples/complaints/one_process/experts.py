"""The number of experts does not divide by the number of ranks

vllm-project/vllm#52435 (open): 256 experts on 3 ranks end in an assertion that the number must divide.
pytorch/torchtitan#4258 (merged) makes such a number an error early.

By default each rank has a part of every expert, and their number does not matter. `experts="expert"` gives each rank
whole experts, and needs a number that divides: others are cut by width, and the plan says so.
"""

from transformers import MixtralConfig, MixtralForCausalLM

import autotp

config = MixtralConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=64, eos_token_id=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=3,
)  # fmt: skip
model = MixtralForCausalLM(config)

report = autotp.verify(model, tp=2)
layouts = {cut.name: str(cut.layout) for cut in report.plan.cuts}
assert layouts["model.layers.0.mlp.experts.down_proj"] == "[3, 32, 48@tp]"
assert report.ok, report
