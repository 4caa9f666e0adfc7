"""Pages, tables, pictures and traces for people."""
