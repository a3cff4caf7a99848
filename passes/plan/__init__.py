"""A canonical graph -> the axes of its tensors, and the decision which are cut (`experts` decides about experts)."""
