"""Functions that graphs call, on plain tensors: collectives, and operators that work on parts.

What may not enter: graphs and rules.
"""
