"""Triton source that packages carry as it is."""
