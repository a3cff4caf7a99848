"""Computes a batch in two halves, so that one computes while the other communicates."""
