"""What operators and collectives take on a device: seconds, bytes, FLOPs."""
