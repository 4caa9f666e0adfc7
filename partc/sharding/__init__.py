"""Which layout every value gets: placements as an integer program, the user's pins, resharding."""
