"""Derives the types of a rank's graph again, with code that shares nothing with the passes that made the graph.

What may not enter: imports of choose, lower and localize.
"""
