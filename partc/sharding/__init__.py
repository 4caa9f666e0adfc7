"""The choice of layouts: placements as an integer program, the user's pins, resharding."""
