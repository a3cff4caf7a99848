"""A planned graph -> the graph of one rank, with a conjugate (collective) wherever placements differ.

Softmax and class losses over a cut axis are decomposed here (`decompose`, `losses`).
"""
