"""The temperatures at which rows and heads are looked at: the model as trained runs at 1."""

TEMPERATURES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
