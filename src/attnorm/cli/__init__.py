"""The command `attnorm`: one file per verb; each parses, calls, prints.

Results go to stdout (`--json` for machines), progress to stderr. Exit codes: 0 done, 1 a check or promise failed or
the machine gave out (disk, memory), 2 wrong usage or input, 130 interrupted.
"""

import typer

from attnorm.cli import analyze, bench, compare, dispersion, doctor, frontier, normalizers, report, train, verify

app = typer.Typer(
    name="attnorm",
    help="How sharply attention selects: measure any model, know the limit, replace softmax.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for verb in (
    analyze.analyze, compare.compare, report.report, normalizers.normalizers, dispersion.dispersion, frontier.frontier,
    verify.verify, bench.bench, doctor.doctor,
):  # fmt: skip
    app.command()(verb)
app.add_typer(train.train)

__all__ = ["app"]
