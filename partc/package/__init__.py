"""Handling packages: writing, running, verifying and exporting them."""
