"""The ranks: who they are, that they were called alike, and tensors of which each of them has a part.

What may not enter: graphs.
"""
