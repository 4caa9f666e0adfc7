"""A whole run: its command line, data, steps, log and traces."""
