"""Tells a user about a parallel model without a GPU and without processes: the plan, the stages, the verification.

What may not enter: anything that a training step runs.
"""
