"""A canonical graph -> the axes of its tensors, and the decision which are cut.

`match` finds heads, widths and vocabulary, and the grid of ranks where there are fewer key/value heads than ranks;
`choose` decides among them; `experts` decides about experts.
"""
