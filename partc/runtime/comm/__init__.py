"""Collectives and transfers between ranks."""
