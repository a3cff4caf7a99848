"""Tensor, pipeline and data parallelism together: `distribute`, and the trainer that runs training steps.

`compute_dtype` casts to a lower precision, and `trainer` scales the loss. `model_settings` tells models of equal shapes
apart, for checkpoints. What may not enter: files.
"""
