"""Functions that graphs call, on plain tensors, and their backwards: collectives, and operators that work on parts.

`collectives` says how backward communicates, `async_linear` what it computes meanwhile. What may not enter: graphs
and rules.
"""
