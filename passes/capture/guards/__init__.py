"""Facts that a graph was captured with, and whether they still hold."""
