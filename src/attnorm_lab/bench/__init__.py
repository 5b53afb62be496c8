"""Benchmarks: speed and memory against other implementations, and the weight on one key in long contexts."""
