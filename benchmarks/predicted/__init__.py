"""Compares what `autotp.estimate` predicts with steps that are trained here."""
