"""`python -m attnorm_lab`: the commands of `attnorm lab` without an installed script."""

from attnorm_lab.cli import app

app(prog_name="attnorm lab")
