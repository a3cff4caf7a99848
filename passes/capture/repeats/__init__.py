"""Captures the first of several blocks that are alike, and repeats its operators for the others."""
