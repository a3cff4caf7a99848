"""What is installed in torch as long as a parallel model lives: for optimizers, clipping, scaling and wrappers."""
