"""A rank's graph is typed anew, by code that shares nothing with the passes that made it.

What may not enter: imports of choose, lower and localize.
"""
