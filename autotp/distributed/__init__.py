"""The ranks: the place of each process, the check that all make the same calls, and tensors that are cut over them.

Warnings belong here, too, if the user's code uses a part as the whole (`cut_parameter`). What may not enter: graphs.
"""
