"""From model files, Hugging Face configurations and Python objects to the traced program."""
