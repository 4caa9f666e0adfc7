"""Tests and measurements on a GPU: `python -m tests.gpu` runs all of them, correctness first, and prints tables."""
