"""Plain training loops with torch's own optimizers, against packages in real processes: whole state dicts in fp64."""
