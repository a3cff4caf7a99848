"""Stands for liger-kernel 0.6: names and signatures of its functions and modules."""
