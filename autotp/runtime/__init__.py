"""The module that `parallelize` returns, and its calls, whose inputs are compared between ranks.

Its global norm is in `grad_norm`, its parts under ZeRO in `fsdp`. What may not enter: training loops, files.
"""
