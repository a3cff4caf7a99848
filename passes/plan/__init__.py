"""A canonical graph -> the axes of its tensors, and the decision which of them are cut; of experts, `experts` decides."""
