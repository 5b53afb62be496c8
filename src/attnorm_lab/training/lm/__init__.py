"""Train a small language model on text files and write a Hugging Face folder."""
