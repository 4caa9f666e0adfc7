"""A compile as a whole: the user's options, and the fitting of programs into memory."""
