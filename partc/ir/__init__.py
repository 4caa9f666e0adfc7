"""The IR: meshes, layouts, programs of regions and calls; its text, both ways; what every pass must leave true."""
