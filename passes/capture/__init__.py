"""A model -> a graph of ATen operators, and the guards under which it is right."""
