"""Figure 2 of Mudarisov et al. 2025: distances between selected keys and the rest, and the critical N."""
