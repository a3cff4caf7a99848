"""Functions that graphs call, on plain tensors, and their backwards: collectives, and operators that work on parts.

What is sent in backward, and what runs meanwhile, is decided here. What may not enter: graphs and rules.
"""
