"""The module that `parallelize` returns, and its calls.

What may not enter: training loops, files.
"""
