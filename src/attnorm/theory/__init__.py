"""What is provable about attention weights: bounds as printed, bounds as corrected, and the exact quantities."""
