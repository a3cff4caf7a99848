"""Predicts a training step from the lowered graphs: counts what they do, prices it for a device, plays the schedule."""
