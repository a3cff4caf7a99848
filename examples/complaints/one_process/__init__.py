"""Scripts that need no second process: `python examples/complaints/one_process/heads.py`."""
