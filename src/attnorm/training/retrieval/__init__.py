"""Small models that pick from sets: trained on few items, tested on very many; one stack of seeds per normalizer."""
