"""Training within a limit of memory."""
