"""A step of an emitted package on tensors without memory: the bytes that every rank holds, and when."""
