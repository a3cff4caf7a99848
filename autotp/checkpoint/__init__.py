"""Reads and writes the state of models and of training: each rank reads and writes its parts of the files.

What may not enter: formats of other libraries' models.
"""
