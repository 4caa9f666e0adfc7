"""The files that a user brings: model files, Hugging Face configurations, own modules, and own optimizers."""
