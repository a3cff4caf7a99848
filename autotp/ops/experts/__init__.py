"""Works on the rows of a mixture of experts: sorts them, multiplies them, sends them to other ranks."""
