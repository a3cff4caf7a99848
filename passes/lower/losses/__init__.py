"""The losses over classes, in parts: over a cut vocabulary, and in one operator with the head."""
