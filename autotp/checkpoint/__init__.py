"""A training's state in files: written by the ranks that hold it, read by any others.

What may not enter: formats of other libraries' models.
"""
