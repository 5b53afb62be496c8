"""Induction, previous-token and retrieval heads of a model, and the weight on their key against the length."""
