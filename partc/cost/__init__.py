"""What a step costs: seconds by roofline and simulation, bytes in memory, bytes on the wire."""
