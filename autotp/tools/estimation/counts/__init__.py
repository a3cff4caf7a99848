"""Counts what a rank's graph does for one microbatch: operators, collectives, and the memory that backward keeps."""
