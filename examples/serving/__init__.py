"""A server that answers requests with a tensor-parallel model."""
