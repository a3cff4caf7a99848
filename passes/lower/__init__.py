"""A planned graph -> the graph of one rank, with a conjugate wherever placements differ.

Softmax and class losses over a cut axis are decomposed here (`decompose`).
"""
