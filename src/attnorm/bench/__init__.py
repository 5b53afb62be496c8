"""Measurements: speed and memory against what one would use instead, and the weight a winner keeps at length."""
