"""What a graph was captured with, and whether it is still the same."""
