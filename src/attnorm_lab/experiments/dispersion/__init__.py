"""Dispersion against context length: the rate test, and for how many heads the ceiling of softmax binds."""
