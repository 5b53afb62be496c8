"""Small vision transformers that classify images, with any normalizer."""
