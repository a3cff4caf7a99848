"""What other libraries need to train a parallel model, and their files. Of other folders only `tools` imports it."""
