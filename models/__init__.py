"""Ordinary single-device models. They import nothing of autotp; import them as `autotp.models`."""
