"""The loop of the pretraining scripts: sizes and flags, logs, checkpoints."""
