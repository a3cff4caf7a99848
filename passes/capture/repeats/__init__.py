"""Blocks that are alike are captured once."""
