"""attnorm normalizers, dispersion, frontier: what normalizers promise, and what they do as the context grows.

The table of normalizers is read from the normalizers themselves.
"""

import inspect
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from attnorm.cli.output import ByWidth, Json, ProgressBar, say, show, show_json, usage_errors
from attnorm.normalizers.contract import Mechanism, RowSum
from attnorm.normalizers.registry import NormalizerEntry, as_normalizer, entries


def normalizers(as_json: Json = False) -> None:
    """List all normalizers with their properties and papers.

    Example: attnorm normalizers --json
    """
    descriptions = describe_all()
    if as_json:
        show_json([asdict(description) for description in descriptions])
    else:
        show(ByWidth(normalizer_table(descriptions), normalizer_table(descriptions, narrow=True)))


def dispersion(
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for dispersion.svg and .png.")] = None,
    gap: Annotated[float, typer.Option(help="Logit of the winner minus the mean of the other logits.")] = 6.0,
    noise: Annotated[float, typer.Option(help="Standard deviation of the other logits; 0 makes them equal.")] = 1.0,
    draws: Annotated[int, typer.Option(help="Random rows per length; the table shows their median.")] = 5,
    seed: Annotated[int, typer.Option(help="Random seed for the rows.")] = 0,
    as_json: Json = False,
) -> None:
    """Show the weight that the largest of 16 to 131,072 logits keeps under every normalizer.

    Example: attnorm dispersion --gap 8 --out figures
    """
    from attnorm.bench.dispersion import dispersion as measure
    from attnorm.bench.dispersion import dispersion_table

    with ProgressBar() as progress, usage_errors():
        measured = measure(
            gap=gap, noise=noise, draws=draws, seed=seed, progress=lambda name: progress(f"measuring {name}")
        )
    if as_json:
        show_json(measured.as_dict())
    else:
        show(dispersion_table(measured))
    if out is not None:
        from attnorm.bench.figures import save_dispersion_figure

        for path in save_dispersion_figure(measured, out):
            say(f"wrote {path}")


def frontier(
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for frontier.svg and frontier.png.")] = None,
    as_json: Json = False,
) -> None:
    """Show the effort K g that each normalizer needs to keep a weight of 0.5 or 0.9 among 16 to 1,000,000 keys.

    The table has the lower bound for all normalizers next to it. A normalizer that the bound does not cover is listed
    with the reason.

    Example: attnorm frontier --out figures
    """
    from attnorm.claims.tables import frontier_table
    from attnorm.theory.frontier import place_on_frontier

    with ProgressBar() as progress:
        placed = place_on_frontier(progress=lambda name: progress(f"measuring {name}"))
    if as_json:
        show_json(placed.as_dict())
    else:
        show(frontier_table(placed))
    if out is not None:
        from attnorm.claims.figures import save_frontier_figure

        for path in save_frontier_figure(placed, out):
            say(f"wrote {path}")


KEYS = 1024  # row length of the Lipschitz constants


@dataclass(frozen=True, kw_only=True)
class Description:
    """One normalizer with its default options."""

    name: str
    kind: str  # "row": weights from one row of logits; "mechanism": needs q, k, v
    summary: str
    row_sum: RowSum
    signed: bool
    exact_zeros: bool
    shift_invariant: bool
    permutation_equivariant: bool
    length: str
    lipschitz_1024: float | None  # for rows of 1,024 keys; None: unbounded or not known
    swap_untrained: bool
    learned: tuple[str, ...]  # parameters that train by default
    options: tuple[str, ...]
    paper: str
    url: str


def describe_all() -> list[Description]:
    """Describe all normalizers, also registered ones, in the order of the registry."""
    return [describe(name, entry) for name, entry in entries().items()]


def describe(name: str, entry: NormalizerEntry) -> Description:
    factory = entry.factory()
    normalizer = as_normalizer(factory(), name)
    declared = normalizer.properties
    return Description(
        name=name,
        kind="mechanism" if isinstance(normalizer, Mechanism) else "row",
        summary=entry.summary,
        row_sum=declared.row_sum,
        signed=declared.signed,
        exact_zeros=declared.exact_zeros,
        shift_invariant=declared.shift_invariant,
        permutation_equivariant=declared.permutation_equivariant,
        length=declared.length,
        lipschitz_1024=None if isinstance(normalizer, Mechanism) else normalizer.lipschitz(KEYS),
        swap_untrained=declared.swap_untrained,
        learned=tuple(
            key.rpartition(".")[2].removeprefix("raw_")
            for key, value in normalizer.named_parameters()
            if value.requires_grad
        ),
        options=tuple(inspect.signature(factory).parameters),
        paper=entry.paper,
        url=entry.url,
    )


ROW_SUM: dict[RowSum, str] = {"one": "1", "at most one": "≤ 1", "free": "any"}


def promises(description: Description) -> str:
    """Return the properties in one line, as docs/normalizers.md shows them."""
    parts = [
        {"one": "sum 1", "at most one": "sum ≤ 1", "free": "any sum"}[description.row_sum],
        "weights may be negative" if description.signed else "weights ≥ 0",
        "exact zeros" if description.exact_zeros else "",
        "shift invariant" if description.shift_invariant else "",
        "" if description.permutation_equivariant else "order of the keys matters",
        f"length enters by {description.length}" if description.length else "",
        "swap" if description.swap_untrained else "",
    ]
    return f"Promises: {'; '.join(part for part in parts if part)}."


NARROW = ("name", "sum", "zeros", "length enters by", "Lipschitz", "swap")  # these fit into 80 columns


def normalizer_table(descriptions: list[Description], *, narrow: bool = False) -> Table:
    table = Table(
        title="Normalizers: logits to weights",
        caption="zeros: some visible keys get exactly 0. shift: a constant added to a row changes nothing. Lipschitz: "
        f"largest norm of the Jacobian over rows of {KEYS} keys, if known. swap: can replace softmax in a trained "
        "model without training. Last group (italics): mechanisms, which need q, k and v instead of a row of logits."
        + (" A wider terminal shows more columns." if narrow else ""),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    headings = NARROW if narrow else tuple(_cells(descriptions[0]))
    for heading in headings:
        table.add_column(heading, justify="right" if heading == "Lipschitz" else "left", no_wrap=heading == "name")
    for kind in ("row", "mechanism"):
        table.add_section()
        for description in (description for description in descriptions if description.kind == kind):
            cells = _cells(description)
            table.add_row(*(cells[heading] for heading in headings))
    return table


def _cells(description: Description) -> dict[str, str | Text]:
    return {
        "name": Text(description.name, style="bold" if description.kind == "row" else "bold italic"),
        "sum": ROW_SUM[description.row_sum],
        "sign": "±" if description.signed else "+",
        "zeros": "yes" if description.exact_zeros else "",
        "shift": "yes" if description.shift_invariant else "",
        "length enters by": description.length,
        "Lipschitz": "" if description.lipschitz_1024 is None else f"{description.lipschitz_1024:.3g}",
        "swap": "yes" if description.swap_untrained else "",
        "learned": ", ".join(description.learned),
        "paper": Text(
            description.paper, style=f"link {description.url}" if description.url.startswith("https://") else ""
        ),
    }
