"""Traceable forms of modules and functions of torch that read values as Python numbers."""
