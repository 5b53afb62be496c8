"""How the experiments' results are drawn, one file per experiment; nothing is measured here."""
