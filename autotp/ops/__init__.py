"""Functions that graphs call, on plain tensors: collectives, and operators in the form that works on parts.

What may not enter: graphs and rules.
"""
