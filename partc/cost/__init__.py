"""The cost of a step: seconds by roofline and simulation, bytes in memory, bytes that ranks exchange."""
