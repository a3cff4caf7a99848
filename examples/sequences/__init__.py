"""Training on sequences that are longer than one process can hold."""
