"""Continuous batching of transformers: attention to pages of a cache, on ranks with their heads."""
