"""Stands for xformers."""

__version__ = "0.0.35"
