"""NVIDIA cards that are not there: a device, NCCL with its failures, and what counts the waits of the host."""
