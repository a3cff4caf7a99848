"""Tensor, pipeline and data parallelism together: `distribute`, and the trainer that runs training steps.

What may not enter: files.
"""
