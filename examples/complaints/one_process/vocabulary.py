"""The vocabulary does not divide by the number of ranks

vllm-project/vllm#440 (closed): BLOOM's 250,682 words do not divide by 8, so the model did not load;
vllm-project/vllm#31474 (closed) reports the same of 151,552 words on 6 GPUs. Padding costs, too: in
vllm-project/vllm#20843 (merged) embedding and head were padded differently, and LoRA crashed.

The last rank has fewer rows. No row is padded, so none is hidden from the loss or taken out of a file.
"""

from transformers import BloomConfig, BloomForCausalLM

import autotp

model = BloomForCausalLM(BloomConfig(vocab_size=251, hidden_size=32, n_layer=1, n_head=4))

report = autotp.verify(model, tp=4)
rows = {cut.name: cut.layout.lengths() for cut in report.plan.cuts}
assert rows["transformer.word_embeddings.weight"] == [63, 63, 63, 62]
assert report.ok, report
