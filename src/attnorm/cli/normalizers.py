"""attnorm normalizers, dispersion, frontier, verify: list and compare normalizers, and test claims of the papers.

The table of normalizers is read from the normalizers themselves.
"""

import inspect
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from attnorm.cli.output import ByWidth, Json, ProgressBar, failures, say, show, show_json, usage_errors
from attnorm.normalizers.contract import Mechanism, RowSum
from attnorm.normalizers.registry import NormalizerEntry, as_normalizer, entries, entry_of

if TYPE_CHECKING:
    from attnorm.theory import Claim


def normalizers(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Normalizer to show with its options (default: list all).")
    ] = None,
    as_json: Json = False,
) -> None:
    """List all normalizers with their properties and papers, or show one.

    Example: attnorm normalizers entmax
    """
    if name is not None:
        with usage_errors():
            descriptions = [describe(name, entry_of(name))]
    else:
        descriptions = describe_all()
    if as_json:
        show_json([asdict(description) for description in descriptions])
    elif name is not None:
        show(Text("\n").join([Text(name, style="bold"), *map(Text, sheet(descriptions[0]))]))
    else:
        show(ByWidth(normalizer_table(descriptions), normalizer_table(descriptions, narrow=True)))


def dispersion(
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write the figure to this folder: dispersion.svg and dispersion.png."),
    ] = None,
    gap: Annotated[float, typer.Option(help="Largest logit minus the mean of the other logits.")] = 6.0,
    noise: Annotated[float, typer.Option(help="Standard deviation of the other logits; 0 makes them equal.")] = 1.0,
    draws: Annotated[int, typer.Option(help="Number of random rows per length; the table shows their median.")] = 5,
    seed: Annotated[int, typer.Option(help="Random seed for the rows.")] = 0,
    as_json: Json = False,
) -> None:
    """Show how much weight each normalizer gives to the largest of 16 to 131,072 logits.

    Example: attnorm dispersion --gap 8 --out figures
    """
    from attnorm.bench.dispersion import dispersion as measure
    from attnorm.bench.dispersion import dispersion_table

    with failures(out_of_memory="Use fewer --draws."), ProgressBar() as progress:
        measured = measure(
            gap=gap, noise=noise, draws=draws, seed=seed, progress=lambda name: progress(f"measuring {name}")
        )
    if as_json:
        show_json(measured.as_dict())
    else:
        show(dispersion_table(measured))
    if out is not None:
        from attnorm.bench.figures import save_dispersion_figure

        with failures(writes_to=out):
            for path in save_dispersion_figure(measured, out):
                say(f"wrote {path}")


def frontier(
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write the figure to this folder: frontier.svg and frontier.png."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what each normalizer needs to keep a weight of 0.5 or 0.9 on one key among 16 to 1,000,000.

    The cost is the product K g of the Lipschitz constant K and the gap g between the largest logit and the others. The
    table also has the lower bound for all normalizers. Normalizers that the bound does not cover are listed with the
    reason.

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

        with failures(writes_to=out):
            for path in save_frontier_figure(placed, out):
                say(f"wrote {path}")


def verify(
    names: Annotated[list[str] | None, typer.Argument(metavar="CLAIM", help="Claims to search (default: all).")] = None,
    budget: Annotated[
        float,
        typer.Option(
            help="Time for the search in seconds. Every claim gets at least nine rounds, which take up to a "
            "minute for all claims; the remaining time is used for more rounds."
        ),
    ] = 60.0,
    seed: Annotated[
        int, typer.Option(help="Random seed for the rows; the same seed finds the same counterexamples.")
    ] = 0,
    figure: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write the figure to this folder: tightness.svg and tightness.png."),
    ] = None,
    again: Annotated[
        str | None,
        typer.Option("--replay", metavar="CLAIM:SEED:ROUND:ROW", help="Show one counterexample of the table in full."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Search the claims of the papers, their corrections and the properties of all normalizers for counterexamples.

    Exit codes: 0 every claim has the expected status; 1 a claim does not; 130 interrupted, with the results so far.

    Example: attnorm verify corollary-3 --budget 20
    """
    with usage_errors():
        if again is not None:
            _replay(again, as_json)
            return
        claims = _claims_by_name(names or [])
    from attnorm.claims.tables import findings_as_dict, findings_table
    from attnorm.theory.search import SearchInterrupted, table_stands
    from attnorm.theory.search import verify as search

    interrupted = False
    try:
        with usage_errors(), ProgressBar("searching") as progress:
            findings = search(
                claims,
                budget_seconds=budget,
                seed=seed,
                progress=lambda claim, share: progress("searching", share, 1.0, detail=claim.id),
            )
    except SearchInterrupted as stopped:
        findings, interrupted = [finding for finding in stopped.findings if finding.rounds], True
    if as_json:
        show_json(findings_as_dict(findings, seed))
    else:
        show(findings_table(findings))
    if interrupted:
        say("Interrupted: the table shows the claims searched so far.")
        raise typer.Exit(130)
    if figure is not None:
        from attnorm.claims.figures import save_tightness_figure

        with failures(writes_to=figure):
            for path in save_tightness_figure(findings, figure):
                say(f"wrote {path}")
    if not table_stands(findings):
        raise typer.Exit(1)


def _claims_by_name(names: list[str]) -> "list[Claim]":
    """Return the claims with these names in the order of the table; all if none is named."""
    from attnorm.text import did_you_mean
    from attnorm.theory import claims

    known = {claim.id: claim for claim in claims()}
    for name in names:
        if name not in known:
            raise ValueError(f"unknown claim {name!r}; {did_you_mean(name, known)}")
    return [claim for claim in known.values() if not names or claim.id in names]


def _replay(address: str, as_json: bool) -> None:
    from attnorm.claims.tables import counterexample_as_dict, counterexample_text
    from attnorm.theory import replay
    from attnorm.theory.catalogue.claim import ROWS

    name, *numbers = address.split(":")
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        raise ValueError(
            f"--replay: expected CLAIM:SEED:ROUND:ROW from the table, e.g. corollary-3:0:6:29, got {address!r}"
        )
    (claim,) = _claims_by_name([name])
    seed, round_number, row = map(int, numbers)
    if row >= ROWS:
        raise ValueError(f"--replay: expected a row from 0 to {ROWS - 1}, got {row}")
    case, ratios = replay(claim, seed, round_number)
    show_one = (claim, case, row, float(ratios[row]))
    if as_json:
        show_json(counterexample_as_dict(*show_one))
    else:
        show(counterexample_text(*show_one))


KEYS = 1024  # row length of the Lipschitz constants


@dataclass(frozen=True, kw_only=True)
class Description:
    """One normalizer with its default options."""

    name: str
    kind: str  # "row": weights from one row of logits; "mechanism": needs q, k, v
    summary: str
    notes: str  # what to know before using it, in paragraphs
    row_sum: RowSum
    signed: bool
    exact_zeros: bool
    shift_invariant: bool
    permutation_equivariant: bool
    length: str
    lipschitz_1024: float | None  # for rows of 1,024 keys; None: unbounded or not known
    swap_untrained: bool
    learned: tuple[str, ...]  # parameters that train by default
    options: dict[str, str]  # with their defaults
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
        notes=entry.notes,
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
        options={name: repr(option.default) for name, option in inspect.signature(factory).parameters.items()},
        paper=entry.paper,
        url=entry.url,
    )


ROW_SUM: dict[RowSum, str] = {"one": "1", "at most one": "≤ 1", "free": "any"}


def promises(description: Description) -> str:
    """Return the properties in one line."""
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


def sheet(description: Description) -> list[str]:
    """Return one normalizer in paragraphs, as `attnorm normalizers NAME` and docs/normalizers.md show it."""
    norm = description.lipschitz_1024
    facts = [
        promises(description),
        "" if norm is None else f"Largest Jacobian norm over rows of {KEYS:,} keys: {norm:.3g}",
        f"Options: {', '.join(f'{name}={default}' for name, default in description.options.items()) or 'none'}",
        f"Paper: {description.paper}, {description.url}",
    ]
    notes = [" ".join(paragraph.split()) for paragraph in description.notes.split("\n\n") if paragraph]
    return [description.summary, *(fact for fact in facts if fact), *notes]


NARROW = ("name", "sum", "zeros", "length enters by", "Lipschitz", "swap")  # these fit into 80 columns


def normalizer_table(descriptions: list[Description], *, narrow: bool = False) -> Table:
    table = Table(
        title="Normalizers: logits to weights",
        caption="sum: of the weights of a row. sign: ± if weights may be negative. zeros: weights can be exactly 0. "
        "shift: adding a constant to a row of logits changes nothing. length enters by: how the number n of visible "
        f"keys changes the weights. Lipschitz: largest Jacobian norm over rows of {KEYS:,} keys, if known. swap: can "
        "replace softmax in a trained model without training. learned: parameters that are trained by default. Last "
        "group (italics): mechanisms, which need q, k and v instead of a row of logits."
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
