"""Max retrieval of Velickovic et al. 2024: pick the largest of n items; trained on at most 16, tested up to 131,072."""
