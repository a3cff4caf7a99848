"""Counts what a rank's graph does for one microbatch: operators, collectives, and the memory that backward keeps.

`record` has the bytes of each operator and of each collective.
"""
