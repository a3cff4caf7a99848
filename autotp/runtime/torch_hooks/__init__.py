"""Hooks in torch while a parallel model exists: optimizers, clipping, scaling, wrappers."""
