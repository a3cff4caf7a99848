"""A checked graph -> modules that run in a process: groups, memory, blocks, parameters."""
