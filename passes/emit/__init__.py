"""A checked graph -> modules that run in a process: adds process groups, reuse of memory, blocks, parameters."""
