"""The ranks: the place of each process, the check that all make the same calls, and tensors that are cut over them.

A rank that is lost is found here (`heartbeat`; `ops/collectives` makes its peers' error), and a part that the user's
code takes for the whole (`cut_parameter`). What may not enter: graphs.
"""
