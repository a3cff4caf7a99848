"""What no graph can have: found, and said in the user's terms."""
