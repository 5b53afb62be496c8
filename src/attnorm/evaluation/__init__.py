"""Evaluate a model before and after a swap of its normalizer, on the same documents.

Perplexity and pass keys are our own; RULER and every other task come from lm-eval (`attnorm[eval]`).
"""
