"""Prices counts for a device: seconds of operators and collectives, and of a schedule, action by action."""
