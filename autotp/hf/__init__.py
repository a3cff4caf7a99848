"""All that autotp knows of Hugging Face's transformers: its checkpoints, its decoding loops, its operators.

Nothing outside this folder imports it, and transformers itself is imported where it is needed, not before.
"""
