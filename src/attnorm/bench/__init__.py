"""Benchmarks: speed and memory against the alternatives, and the weight that a clear winner keeps in long contexts."""
