"""Computations that emitted functions call, each with its explicit backward."""
