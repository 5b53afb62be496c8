"""Run a plan of many items on this machine, on Ray or on Slurm, and merge their results."""
