"""Tensor, pipeline and data parallelism together: `distribute`, and the step that trains.

What may not enter: files.
"""
