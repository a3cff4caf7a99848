"""Initialises models on `meta`: runs their own initialisers again, module by module.

What may not enter: graphs.
"""
