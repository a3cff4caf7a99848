"""What is true of each operator: how the dimensions of its operands and its output correspond.

What may not enter: a choice of what is cut.
"""
