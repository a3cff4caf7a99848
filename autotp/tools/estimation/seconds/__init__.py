"""Prices counts for a device: seconds of operators and collectives, and of a schedule, action by action.

`hardware` has the table of devices (`gpu="h100-80gb"`), and `links` what a collective costs.
"""
