"""Train a small image classifier with a normalizer and test it: accuracy, speed and memory in one record."""
