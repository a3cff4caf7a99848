"""What a pipeline needs of a graph: independent rows, totals of a loss, stages and what they cost."""
