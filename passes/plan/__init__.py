"""A canonical graph -> the axes of its tensors, and which of them are cut."""
