"""Engines: each computes attention for some normalizers; attention.py chooses one. `blocked` computes all of them."""
