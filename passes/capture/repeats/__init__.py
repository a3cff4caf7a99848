"""Captures blocks that are alike once."""
