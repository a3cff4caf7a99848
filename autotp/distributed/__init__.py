"""The ranks: which process is which, whether all were called alike, and tensors that are spread over them.

What may not enter: graphs.
"""
