"""What of a block's values backward finds: kept, in fewer bytes, on the host, or computed again."""
