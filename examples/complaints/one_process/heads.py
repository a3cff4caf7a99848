"""The number of heads does not divide by the number of GPUs

vllm-project/vllm#11797 (closed as stale): vLLM refuses Qwen2-7B, with 28 heads and 4 key/value heads, on the 8 GPUs of
a node. The thread asks for padding with heads of zeros, or for attention that every rank computes whole.

Nothing is padded: four ranks have four heads, and four have three, so attention takes as long as with 32 heads. The
four key/value heads are on two ranks each.
"""

from transformers import Qwen2Config, Qwen2ForCausalLM

import autotp

config = Qwen2Config(
    hidden_size=56, intermediate_size=96, num_hidden_layers=1, vocab_size=64, num_attention_heads=28,
    num_key_value_heads=4,
)  # fmt: skip
model = Qwen2ForCausalLM(config)

report = autotp.verify(model, tp=8)
rows = {cut.name: cut.layout.lengths() for cut in report.plan.cuts}
assert rows["model.layers.0.self_attn.q_proj.weight"] == [2 * heads for heads in (4, 3, 4, 3, 4, 3, 4, 3)]
assert report.ok, report
