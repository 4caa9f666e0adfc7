"""The cost of a training step: its seconds by roofline and simulation, its memory, and the bytes that ranks
exchange.
"""
