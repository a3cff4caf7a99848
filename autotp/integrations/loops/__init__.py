"""The training loops of accelerate, transformers.Trainer and TRL, which take each process for a replica.

`CHANGES` in `transformers/library.py` lists what is changed in them, and in torchmetrics. What may not enter: an import
of one of these libraries before the user's program imports it.
"""
