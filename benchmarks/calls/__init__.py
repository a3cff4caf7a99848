"""What a call of a parallel model costs beside its graph."""
