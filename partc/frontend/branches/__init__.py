"""Python branches on values of tensors and on random numbers, which are unknown in a trace."""
