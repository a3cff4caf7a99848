"""A captured graph -> the same function in a canonical form: biases outside of products, no writes into inputs."""
