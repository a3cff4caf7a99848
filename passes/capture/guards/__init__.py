"""The facts that a graph relies on (`walk`, `code_names`), and their check in each call (`guard`)."""
