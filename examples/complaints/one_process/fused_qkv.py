"""Queries, keys and values are one weight

pytorch/pytorch#140069 (open): `ColwiseParallel` gives the first rank the first rows of a fused weight, which are
queries only. pytorch/pytorch#149701 (closed) proposed a way to cut such weights, whose checkpoints could not be
resharded. huggingface/diffusers#13718 (merged) reorders the rows, by code for each model.

The rules of `split` and `view` say which rows belong together, so each rank gets its part of q, of k and of v. The same
holds for the gate and the up projection in one weight.
"""

from transformers import Phi3Config, Phi3ForCausalLM

import autotp

config = Phi3Config(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=64, pad_token_id=0, num_attention_heads=4,
    num_key_value_heads=2, eos_token_id=2,
)  # fmt: skip
model = Phi3ForCausalLM(config)

report = autotp.verify(model, tp=2)
layouts = {cut.name: cut.layout for cut in report.plan.cuts}
assert layouts["model.layers.0.self_attn.qkv_proj.weight"].pieces[0] == ((0, 16), (32, 40), (48, 56))
assert layouts["model.layers.0.mlp.gate_up_proj.weight"].pieces[0] == ((0, 24), (48, 72))
assert report.ok, report
