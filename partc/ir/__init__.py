"""The IR: meshes, layouts, programs of regions and calls; the printer, the parser, the verifier, the interpreter."""
