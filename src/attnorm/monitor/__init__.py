"""Monitor attention while a model trains: measure a few rows on some steps, and raise alerts; clip QK weights."""
