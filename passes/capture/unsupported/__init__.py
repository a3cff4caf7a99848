"""Finds models that cannot be captured, and raises an Error in the user's terms."""
