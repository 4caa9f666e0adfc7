"""Reports for people: pages, tables, pictures and traces."""
