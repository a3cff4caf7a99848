"""Losses that are operators of their own in a graph."""
