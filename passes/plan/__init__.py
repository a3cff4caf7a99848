"""A canonical graph -> the axes of its tensors (heads, widths, vocabulary, experts), and the decision which are cut.

`match` finds them, `head_grids` the grid of ranks where there are fewer key/value heads than ranks; `choose` decides
among them; `experts` decides about experts. `decouple` gives masks axes of their own where theirs do not fit.
"""
