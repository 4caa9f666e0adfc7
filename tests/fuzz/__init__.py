"""Random programs, meshes, schedules and pins, each held against its single-device model. `make fuzz` runs it."""
