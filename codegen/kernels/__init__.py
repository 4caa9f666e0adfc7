"""Triton kernels: fused operations lowered to statements, and printed."""
