"""The Python values that a graph relies on: found (`walk`), compared (`freeze`), and checked in each call (`guard`)."""
