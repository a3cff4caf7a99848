"""A planned graph -> the graph of one rank, with a conjugate wherever placements differ.

Softmax and the vocabulary-parallel loss over a cut axis are taken apart here (`decompose`).
"""
