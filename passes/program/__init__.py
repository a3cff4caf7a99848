"""The program between two passes, and each pass as a function of it: takes the facts it needs, and adds what it finds.

`autotp/compiler.py` has their order.
"""
