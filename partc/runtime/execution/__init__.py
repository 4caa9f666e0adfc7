"""One training step on one rank: the actions of its schedule and the communication around them."""
