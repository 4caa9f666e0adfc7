"""Packages from outside: writing, running, verifying and exporting them."""
