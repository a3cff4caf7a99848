"""What a rank learns of the others beside its collectives: along a tree of connections, and through the store."""
