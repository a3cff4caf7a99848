"""Converts a model's tensors between training checkpoints, safetensors, torch files and Megatron-LM's checkpoints.

All runs in one process, tensor by tensor, and no code of a file is run.
"""
