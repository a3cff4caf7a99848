"""The support for Hugging Face's transformers: its checkpoints, caches, decoding loops, operators.

`pretrained` reads folders of safetensors. `generation` lists the processors of logits that run on cut logits. `library`
answers the kernel's questions, and lists what is changed in training loops. transformers is imported only when a
function needs it.
"""
