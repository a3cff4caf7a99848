"""Files of tensors: formats, checksums, folders that are replaced as a whole.

What may not enter: models.
"""
