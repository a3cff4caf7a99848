"""A graph -> the operators that are cut along a sequence, by `context_parallel` or `sequence_parallel`.

`context_parallel` cuts over ranks of a mesh axis of its own; `sequence_parallel` cuts the values between a block's
products over the tensor-parallel ranks. `separate_keys` writes attention so that its queries can be cut while its keys
are whole.
"""
