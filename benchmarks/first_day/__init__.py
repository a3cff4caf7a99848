"""The checks of `gpu.py`: what is tried on the first day on GPUs."""
