"""Tensors of which each rank holds a part, as the user's code has them: parameters, gradients, states, outputs.

Each behaves as the whole. A parameter (`cut_parameter`) hands an operator to a `Sharded` (`sharded_tensor`), which
runs it on parts (`sharded_operators`), over ranks, or on the gathered whole (`whole_operators`). No graphs enter here.
"""
