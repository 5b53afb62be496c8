"""What a head does with its keys: statistics of rows of attention, computed block by block."""
