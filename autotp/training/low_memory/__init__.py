"""Optimizers with small states: states in fewer bits, on the host, or both; steps in backward."""
