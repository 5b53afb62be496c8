"""Small models that pick from sets: trained on few items, tested on many. All seeds of a normalizer train together."""
