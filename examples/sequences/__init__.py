"""Training on sequences that are longer than one process can hold, and on texts that lie packed in one row."""
