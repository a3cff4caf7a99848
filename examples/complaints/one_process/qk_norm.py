"""The gradients of q_norm and k_norm are those of a rank's own heads

NVIDIA-NeMo/RL#3716 (open): each rank's gradient of Qwen3's `q_norm` is the sum over its own heads only. In one path of
training nobody sums these over the ranks, and the copies of the weight drift apart without a word. In transformers'
plans the author must choose `replicated_with_grad_allreduce` for such weights.

If divided work reads a weight whole, the weight's gradient is a sum over ranks. This follows from the rules of the
operators, and the graph is checked for it before it runs.
"""

from transformers import Qwen3Config, Qwen3ForCausalLM

import autotp

config = Qwen3Config(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=64, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8,
)  # fmt: skip
model = Qwen3ForCausalLM(config)

report = autotp.verify(model, tp=2)
errors = {gradient.name.removeprefix("model.layers.0.self_attn."): gradient.error for gradient in report.gradients}
assert errors["q_norm.weight"] < 1e-12 and errors["k_norm.weight"] < 1e-12
assert report.ok, report
