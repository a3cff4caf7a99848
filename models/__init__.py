"""Ordinary single-device models, as one would write them without autotp: they import nothing of it."""
