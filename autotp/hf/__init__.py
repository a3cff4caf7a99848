"""The support for Hugging Face's transformers: its checkpoints, its decoding loops, its operators.

No module outside this folder imports it. transformers is imported only when a function needs it.
"""
