"""Triton kernels of a program: the groups of the pass `fuse`, lowered to statements and printed."""
