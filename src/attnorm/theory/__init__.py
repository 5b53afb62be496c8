"""Theory of attention weights: the papers' quantities, their bounds as printed, and corrected bounds."""
