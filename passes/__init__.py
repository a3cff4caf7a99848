"""The passes, one folder for each stage, in the order of the stages.

What may not enter: processes.
"""
