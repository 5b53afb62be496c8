"""The command `attnorm`: one file per verb; each parses, calls, prints.

Results go to stdout (`--json` for machines), progress to stderr. Exit codes: 0 done, 1 a check or promise failed,
2 wrong usage.
"""

import typer

from attnorm.cli import bench, dispersion, doctor, frontier, normalizers, verify

app = typer.Typer(
    name="attnorm",
    help="Alternatives to softmax in attention: what they promise, what they keep, what they cost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for verb in (
    normalizers.normalizers, dispersion.dispersion, frontier.frontier, verify.verify, bench.bench, doctor.doctor,
):  # fmt: skip
    app.command()(verb)

__all__ = ["app"]
