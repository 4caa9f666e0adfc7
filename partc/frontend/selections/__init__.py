"""Rows that masks select, whose number is unknown in a trace."""
