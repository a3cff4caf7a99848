"""Types a rank's graph anew, with code that shares nothing with the passes that made the graph.

What may not enter: imports of choose, lower and localize.
"""
