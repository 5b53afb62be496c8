"""Figure 3 of Mudarisov et al. 2025: the share of selected keys that is geometrically distinguishable."""
