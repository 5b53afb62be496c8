"""The frontier as a terminal table: the effort of every normalizer to keep a weight, and why some have no place."""

import math

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from attnorm.theory.normalizer_frontier import Frontier

MEASURED = "*"  # after a name whose Lipschitz constant is measured


def frontier_table(placed: Frontier) -> RenderableType:
    table = Table(
        title="Effort K g needed to keep a weight w on one of n keys",
        caption="g: how far its logit leads n-1 equal ones; K: the declared Lipschitz constant. A temperature changes "
        "nothing. No shift-invariant, permutation-equivariant map with row sum 1 lies below the law (n w - 1)/(n - 1). "
        f"{MEASURED} K measured, not declared: at least this much, up to the length where measuring takes seconds.",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("normalizer", no_wrap=True)
    table.add_column("w", justify="right")
    for n in placed.lengths:
        table.add_column(f"{n:,}", justify="right", no_wrap=True)
    for weight in placed.weights:
        table.add_section()
        table.add_row("the law", f"{weight:g}", *map(_effort, placed.least(weight)), style="bold")
        for name in placed.names:
            table.add_row(label(name, placed), f"{weight:g}", *map(_effort, placed.efforts(name, weight)))
    return Group(table, _absent(placed)) if placed.absent else table


def label(name: str, placed: Frontier) -> str:
    return name + MEASURED * (name in placed.measured)


def _effort(effort: float) -> str:
    return "" if math.isnan(effort) else f"{effort:.3f}"


def _absent(placed: Frontier) -> Table:
    table = Table(title="Not on the frontier, and why", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("normalizer", no_wrap=True)
    table.add_column("the law does not speak about it")
    for name, reason in placed.absent.items():
        table.add_row(name, reason)
    return table
