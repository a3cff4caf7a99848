"""A captured graph -> the same function in one form: biases outside products, and nothing written into inputs."""
