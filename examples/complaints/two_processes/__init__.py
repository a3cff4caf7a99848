"""Scripts for two ranks: `torchrun --nproc-per-node 2 examples/complaints/two_processes/batches.py`."""
