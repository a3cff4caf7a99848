"""Models that cannot be captured: finds them, and raises an Error in the user's terms."""
