"""A planned graph -> the graph of one rank, with a conjugate wherever placements differ."""
