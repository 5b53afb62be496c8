"""`python -m attnorm`: the command without an installed script."""

from attnorm.cli import app

app()
