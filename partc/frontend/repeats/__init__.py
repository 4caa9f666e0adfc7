"""Equal modules are traced once, however often a model contains and calls them."""
