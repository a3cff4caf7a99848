"""Converts a model's tensors between training checkpoints, safetensors and torch files.

All runs in one process, tensor by tensor, and no code of a file is run.
"""
