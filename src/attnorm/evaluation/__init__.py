"""Does a model still work with another normalizer? Tasks before and after a swap, on the same documents.

Perplexity and pass keys are our own; RULER and every other task come from lm-eval (`attnorm[eval]`).
"""
