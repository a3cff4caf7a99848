"""Files of tensors: pieces, checksums, locks, and folders that are replaced in one step.

What may not enter: models.
"""
