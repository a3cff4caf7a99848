"""A model -> a graph of ATen operators, and the guards under which the graph is right."""
