"""The support for Hugging Face's transformers: its checkpoints, caches, decoding loops, operators.

No module outside this folder imports it. transformers is imported only when a function needs it.
"""
