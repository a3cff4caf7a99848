"""Features that may change and that the kernel does not need. Each plugs into its tables; nobody imports it."""
