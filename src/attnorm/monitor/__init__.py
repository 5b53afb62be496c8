"""Monitor attention while a model trains: a few rows of a few steps, and a warning when something goes wrong."""
