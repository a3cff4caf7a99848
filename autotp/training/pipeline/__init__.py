"""The pipeline of one rank: its stages, torch's schedules that run them, and backward in two halves."""
