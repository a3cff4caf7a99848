"""Pretends cards in each program that tests start: Python imports this file first, as its folder is on PYTHONPATH.

Not in the servers of multiprocessing. Ranks are forked from one, a fork has no threads, and autograd has one for each
card: ranks pretend them themselves. The other one computes nothing.
"""

import os
import sys

SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")

if "AUTOTP_TESTS_CARDS" in os.environ and not any(server in " ".join(sys.orig_argv) for server in SERVERS):
    from cards.pretend import pretend

    pretend()
