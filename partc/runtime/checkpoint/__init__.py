"""Parameters and optimizer states in files."""
