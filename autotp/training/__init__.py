"""Tensor, pipeline and data parallelism together: `distribute`, and the trainer that runs training steps.

`compute_dtype` casts to a lower precision, and `trainer` scales the loss. What may not enter: files.
"""
