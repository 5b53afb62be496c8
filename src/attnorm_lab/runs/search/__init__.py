"""Search for the best normalizer of every layer with Optuna; trials run through the engines of a sweep."""
