"""The ranks: the place of each process, the exchange of values and errors, lost ranks, and tensors that are cut.

A rank that is lost is found here (`peers`; `groups/failures` makes its peers' error), and a part that the user's
code takes for the whole (`cut_parameter`). What may not enter: graphs.
"""
