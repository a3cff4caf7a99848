"""What a rank learns of the others beside its collectives, through the store in which the processes met."""
