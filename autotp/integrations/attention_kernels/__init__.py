"""Kernels of attention: the rule of each by the name of its operator, and what computes it where there is no kernel."""
