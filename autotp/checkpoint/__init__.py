"""Reads and writes model and training state in files, in part on each rank.

What may not enter: formats of other libraries' models.
"""
