"""The command `autotp init`: `train.py`, `ray_train.py` and the files beside them are what it writes, filled in."""
