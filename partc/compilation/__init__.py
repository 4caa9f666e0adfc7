"""A compile as a whole: the options of the user, and programs that fit the memory that there is."""
