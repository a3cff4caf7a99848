"""What is true of each operator: how the dimensions of its operands and its outputs correspond.

What may not enter: a choice of what is cut.
"""
