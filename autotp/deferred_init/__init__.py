"""Models on `meta`: their own initialisers are run again, one module at a time.

What may not enter: graphs.
"""
