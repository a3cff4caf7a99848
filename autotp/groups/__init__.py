"""Process groups: by name, by one thread at a time, and after a failure. What may not enter: tensors, graphs."""
