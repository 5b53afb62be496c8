"""Watching attention while a model trains: a few rows of a few steps, and a word when something goes wrong."""
