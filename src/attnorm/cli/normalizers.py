"""attnorm normalizers: list all normalizers, or show one. The table is read from the normalizers themselves."""

import inspect
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from attnorm.cli.output import ByWidth, Json, show, show_json, usage_errors
from attnorm.normalizers.contract import Mechanism, RowSum
from attnorm.normalizers.declaration import warm_start_of
from attnorm.normalizers.registry import NormalizerEntry, as_normalizer, entries, entry_of


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
    safe_untrained: bool
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
        safe_untrained=warm_start_of(factory).safe,
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
    ]
    return f"Promises: {'; '.join(part for part in parts if part)}."


def sheet(description: Description) -> list[str]:
    """Return one normalizer in paragraphs, as `attnorm normalizers NAME` and docs/normalizers.md show it."""
    norm = description.lipschitz_1024
    facts = [
        promises(description),
        f"Safe in a trained model without training: {'yes' if description.safe_untrained else 'no, or not measured'}",
        "" if norm is None else f"Largest Jacobian norm over rows of {KEYS:,} keys: {norm:.3g}",
        f"Options: {', '.join(f'{name}={default}' for name, default in description.options.items()) or 'none'}",
        f"Paper: {description.paper}, {description.url}",
    ]
    notes = [" ".join(paragraph.split()) for paragraph in description.notes.split("\n\n") if paragraph]
    return [description.summary, *(fact for fact in facts if fact), *notes]


NARROW = ("name", "sum", "zeros", "length enters by", "Lipschitz", "safe")  # these fit into 80 columns


def normalizer_table(descriptions: list[Description], *, narrow: bool = False) -> Table:
    table = Table(
        title="Normalizers: logits to weights",
        caption="sum: of the weights of a row. sign: ± if weights may be negative. zeros: weights can be exactly 0. "
        "shift: adding a constant to a row of logits changes nothing. length enters by: how the number n of visible "
        f"keys changes the weights. Lipschitz: largest Jacobian norm over rows of {KEYS:,} keys, if known. safe: "
        "can replace softmax in a trained model without training (measured on SmolLM2-135M, docs/results/swap.md). "
        "learned: parameters that are trained by default. Last "
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
        "safe": "yes" if description.safe_untrained else "",
        "learned": ", ".join(description.learned),
        "paper": Text(
            description.paper, style=f"link {description.url}" if description.url.startswith("https://") else ""
        ),
    }
