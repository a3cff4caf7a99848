"""Operators of a batch that is computed in two halves, which take turns."""
