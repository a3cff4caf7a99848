"""LoRA adapters on layers that are cut

huggingface/peft#2394 (closed): the plan names layers of the base model, which are elsewhere with LoRA, so training
fails. huggingface/peft#3079 (merged) gave adapters styles that depend on how their layer is cut.

An adapter is two more products in the graph. Each is cut as its layer is: of a column's, B; of a row's, A.
"""

from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import autotp

config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=64, num_attention_heads=4)
base = LlamaForCausalLM(config)
lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
model = get_peft_model(base, lora)

report = autotp.verify(model, tp=2)
attention = "base_model.model.model.layers.0.self_attn."
layouts = {cut.name.removeprefix(attention): str(cut.layout) for cut in report.plan.cuts if "lora" in cut.name}
assert layouts == {"q_proj.lora_B.default.weight": "[32@tp, 4]", "o_proj.lora_A.default.weight": "[4, 32@tp]"}
assert report.ok, report
