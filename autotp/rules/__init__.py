"""States facts about each operator, a row each in `table.py`: how dimensions of operands and outputs correspond.

What may not enter: a decision what is cut.
"""
