"""Settings of trainers that a parallel model needs in a way of its own: noise on embeddings, files of references.

What may not enter: an import of one of these libraries before the user's program imports it.
"""
