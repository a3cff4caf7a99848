"""The module that `parallelize` returns, and its calls; its global norm (`grad_norm`), its parts under ZeRO (`fsdp`).

What may not enter: training loops, files.
"""
