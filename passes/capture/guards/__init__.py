"""The facts of a call that a graph is right for: wanted gradients, sizes, and what Python reads of tensors' values."""
