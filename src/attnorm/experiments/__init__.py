"""The papers' figures and tables as recipes: each measures a model, draws the paper's picture and says what holds."""
