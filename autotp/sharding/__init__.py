"""Says which part of a tensor a rank holds: axes, placements, layouts.

What may not enter: operators and processes.
"""
