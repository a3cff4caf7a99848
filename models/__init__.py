"""Ordinary single-device models, which import nothing of autotp; imported as `autotp.models`."""
