"""The head is tied to the embedding

foundation-model-stack/foundation-model-stack#331 (merged): embedding and head of a tied model stay whole. In
pytorch/torchtitan#1524 (open) a maintainer answers that tied weights are not planned. huggingface/transformers#48779
(open): transformers' rule for tied weights finds only embeddings that are called `embed_tokens`.

One weight stays one weight. Its rows are cut for the lookup and for the logits, and its gradient is the sum of both.
"""

from transformers import GPT2Config, GPT2LMHeadModel

import autotp

model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, bos_token_id=0, eos_token_id=0))
assert model.lm_head.weight is model.transformer.wte.weight

report = autotp.verify(model, tp=2)
layouts = {cut.name: str(cut.layout) for cut in report.plan.cuts}
assert layouts["transformer.wte.weight"] == "[64@tp, 32]"
assert report.ok, report
