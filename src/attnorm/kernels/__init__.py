"""Kernels in Triton, each imported by the engine that runs it, when it runs: attnorm works without Triton."""
