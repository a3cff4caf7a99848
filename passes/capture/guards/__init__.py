"""The facts that a graph relies on (`attribute_paths`, `code_names`), and their check in each call (`guard`)."""
