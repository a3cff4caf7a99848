"""Memory under a budget: counts what a graph keeps for backward, and chooses what stays and what is computed again."""
