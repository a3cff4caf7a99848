"""What runs a call of a parallel model: the graphs of its modules, and the one that fits a call."""
