"""Attention of parts of queries or heads, where it is not torch's own attention on them."""
