"""Optimizers that step whole matrices: each matrix on one rank, its owner."""
