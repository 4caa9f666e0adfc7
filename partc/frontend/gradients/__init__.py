"""Gradients that a model defines or computes itself, and transforms of torch.func."""
