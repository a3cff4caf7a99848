"""Facts that a graph was captured with (`attribute_paths`, `code_names`), and whether they still hold (`guard`)."""
