"""Command line, pages, estimates and the search for a difference: no training step runs anything of it."""
