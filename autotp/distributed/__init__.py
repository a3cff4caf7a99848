"""The ranks: the place of each process, the exchange of values and errors, lost ranks, and tensors that are cut.

A rank that is lost is found here (`peers`; `groups/failures` makes its peers' error). To the user's code a part behaves
as the whole (`cut_tensors`). What may not enter: graphs.
"""
