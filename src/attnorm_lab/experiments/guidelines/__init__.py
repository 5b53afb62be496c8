"""The practical guidelines of Mudarisov et al. 2025, each tested on a model."""
