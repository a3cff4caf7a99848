"""The module that `parallelize` returns, and a call of it.

What may not enter: an optimizer's loop, files.
"""
