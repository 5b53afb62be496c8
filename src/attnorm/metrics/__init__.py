"""Metrics of attention heads: statistics of attention rows, computed block by block."""
