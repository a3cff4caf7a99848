"""Hooks in torch while a parallel model exists: for optimizers, gradient clipping, loss scaling and wrappers."""
