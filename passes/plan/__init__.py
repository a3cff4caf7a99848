"""A canonical graph -> the axes of its tensors, and the decision which of them are cut."""
