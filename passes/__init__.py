"""The passes, one folder for each stage; imported as `autotp.passes`. `autotp/compiler.py` has their order.

What may not enter: processes.
"""
