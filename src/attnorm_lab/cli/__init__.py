"""The commands under `attnorm lab`: train, reproduce, measure speed, search the papers' claims."""

import typer

from attnorm.cli.output import SafeGroup, add_command
from attnorm_lab.cli import bench, reproduce, stability, sweep, theory, train

app = typer.Typer(
    name="lab",
    cls=SafeGroup,
    add_completion=False,
    no_args_is_help=True,
    epilog="Example: attnorm lab reproduce fig4 --quick",
    help="The laboratory: train small models, reproduce the papers, measure speed, search claims for counterexamples.",
)
app.add_typer(train.train)
for command in (
    reproduce.reproduce, sweep.sweep, sweep.search, bench.bench, theory.verify, theory.frontier, theory.dispersion,
    stability.stability,
):  # fmt: skip
    add_command(app, command)

__all__ = ["app"]
