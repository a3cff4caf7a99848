"""BERT's tasks: their files, models, inputs and metrics."""
