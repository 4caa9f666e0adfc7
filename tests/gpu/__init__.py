"""What takes a GPU: `python -m tests.gpu` does all of it in one go, correctness first, and prints tables."""
