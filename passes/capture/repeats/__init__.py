"""Captures the first of several blocks that are alike, and repeats its operators for the others.

NOTE [When a call repeats another] in `repeats.py` says when two are alike.
"""
