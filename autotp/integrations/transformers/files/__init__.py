"""Reads and writes folders of transformers: configurations, models without weights, and tensors in safetensors."""
