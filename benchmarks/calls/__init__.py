"""What a call of a parallel model costs beside its graph, and what a step of a matrix optimizer does."""
