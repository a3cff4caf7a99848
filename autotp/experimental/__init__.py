"""Features that may change and that the kernel does not need: each plugs into its tables."""
