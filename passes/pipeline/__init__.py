"""Prepares a graph for a pipeline: proves that rows are independent, makes losses sums, divides blocks into stages."""
