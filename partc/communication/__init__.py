"""Communication around regions: gathers of parameters, scatters and sums of gradients, transfers between stages.

The passes `actions` and `prefetch` insert it; the modules here give its collectives and bytes (exchanges), its order on
a rank (execution) and its comments in emitted code (descriptions).
"""
