"""Triton source that packages contain unchanged."""
