"""State of a model other than its trained weights: buffers, Python attributes, caches, and shared memory."""
