"""Initialises models on `meta`: runs their own initialisers again, one module at a time.

What may not enter: graphs.
"""
