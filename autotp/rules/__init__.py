"""States facts about each operator: how the dimensions of its operands and its outputs correspond.

What may not enter: a decision what is cut.
"""
