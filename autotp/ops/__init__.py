"""Functions that graphs call, on plain tensors, and their backwards: collectives, and operators that work on parts.

The communication of backward, and the work that overlaps with it, is decided here. What may not enter: graphs, rules.
"""
