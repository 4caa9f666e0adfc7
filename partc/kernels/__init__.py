"""Triton source that packages contain unchanged. The kernels of a program are written by codegen/kernels/."""
