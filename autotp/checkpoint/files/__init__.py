"""Files of tensors: formats, checksums, locks, and folders that are replaced in one step.

What may not enter: models.
"""
