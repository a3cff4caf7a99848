"""The ranks: which process is which, whether all were called alike, and tensors that are spread over them.

A warning where the user's code takes a part for the whole belongs here (`cut_parameter`). What may not enter: graphs.
"""
