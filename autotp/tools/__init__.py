"""Command line, pages, estimates, conversion and the search for a difference: no training step runs anything of it."""
