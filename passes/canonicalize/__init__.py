"""A captured graph -> the same in one way of writing each thing, without operators that write into their inputs."""
