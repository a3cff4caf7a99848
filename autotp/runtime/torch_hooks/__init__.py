"""Hooks in torch while a parallel model exists: for optimizers, clipping, loss scaling, loading and wrappers."""
