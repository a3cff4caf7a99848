"""The command line `autotp`: one file for each command, which reads arguments and shows what the library returns.

typer and rich are the extra `cli`; `main` says so where they are missing.
"""
