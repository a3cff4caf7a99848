"""Pretends cards in each program that tests start: Python imports this file first, as its folder is on PYTHONPATH.

Not in the server that ranks are forked from: a fork has no threads, and autograd has one for each card. Ranks pretend
them themselves.
"""

import sys

from cards.pretend import asked_for, pretend

if asked_for() and "multiprocessing.forkserver" not in " ".join(sys.orig_argv):
    pretend()
