"""What a pipeline needs of a graph: independent rows, totals of a loss, stages and their costs."""
