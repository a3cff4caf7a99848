"""Reads folders of transformers: configurations, models without weights, and the names of tensors in files."""
