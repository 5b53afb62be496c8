"""Attention mechanisms: what needs q, k, v themselves, or more than one row of logits at a time."""
