"""Makes experts an axis that can be cut: over ranks with the same rows, and over ranks with different ones."""
