"""A captured graph -> the same function in one form, without operators that write into their inputs."""
