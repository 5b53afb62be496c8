"""What the views of an analysis (page, figures, terminal) share: the rows that they show; names, marks and colors.

Each verdict has two letters too, so that no one depends on colors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from attnorm.metrics.catalogue import Group
from attnorm.metrics.normalized import MODEL
from attnorm.report_data import MEANING, Tables

DISTANCES = ("fixed_printed", "fixed_tight", "random_printed", "random_lower", "random_upper")


@dataclass(frozen=True)
class VerdictWord:
    name: str  # in the tables
    mark: str
    label: str
    meaning: str

    @property
    def style(self) -> str:
        """CSS class."""
        return f"v-{self.name}" if self.name in MEANING else "v-unknown"


# Worst first, also in legends.
VERDICTS: tuple[VerdictWord, ...] = tuple(
    VerdictWord(name, mark, name, f"{MEANING[name][0].upper()}{MEANING[name][1:]}.")
    for name, mark in (
        ("broken", "Br"),
        ("dispersed-forced", "Df"),
        ("dispersed-by-choice", "Dc"),
        ("dispersed", "Di"),
        ("silent", "St"),
        ("sink-dominated", "Si"),
        ("frozen", "Fr"),
        ("sensitive", "Se"),
        ("differs", "Dt"),
        ("undecided", "Un"),
        ("healthy", "He"),
    )
)
UNKNOWN = VerdictWord("unknown", "?", "not judged", "No verdict was given.")
BY_NAME: dict[str, VerdictWord] = {word.name: word for word in VERDICTS}


def verdict_word(name: str | None) -> VerdictWord:
    """Return the entry of a verdict; a verdict that this version does not know keeps its name."""
    if not name:
        return UNKNOWN
    return BY_NAME.get(name) or VerdictWord(name, "?", name, "")


GROUPS: dict[Group, str] = {
    "weights": "Where the weight goes",
    "limits": "What the logits allow",
    "rate": "How it changes with length",
    "sink": "Without the sink",
    "gradient": "How sensitive the weights are",
    "vectors": "The vectors that attention mixes",
    "circuits": "Circuits: the weight on a known key",
}

KINDS: dict[str, str] = {
    "decoder": "decoder (causal)",
    "encoder": "encoder (bidirectional)",
    "cross": "cross-attention",
}

SHARES = ("sink_mass", "forced_share", "output_gate", "gated_sink_mass")  # metrics shown in percent

# The numbers at the top of a head's panel, and the columns of the table of heads.
PANEL_METRICS = (
    "entropy_ratio", "effective_keys", "max_weight", "weight_ceiling", "sink_mass", "gap_slope", "horizon",
    "jacobian_norm",
)  # fmt: skip
TABLE_METRICS = tuple(name for name in PANEL_METRICS if name != "weight_ceiling")

# Colors, as in the HTML page.
SCALE = ("#2a1a5e", "#34438c", "#2c6a94", "#25908c", "#4bb573", "#a3d04d", "#f6e34b")
VERDICT_COLORS: dict[str, tuple[str, str]] = {  # fill, ink
    "broken": ("#1c1c1f", "#ffffff"),
    "dispersed-forced": ("#b8470f", "#ffffff"),
    "dispersed-by-choice": ("#eda73a", "#2b1a00"),
    "dispersed": ("#f3d3a2", "#2b1a00"),
    "differs": ("#cd86ae", "#2a0b1d"),
    "undecided": ("#b9b7b0", "#1f2023"),
    "silent": ("#6a1fb0", "#ffffff"),
    "sink-dominated": ("#85c4ec", "#06263a"),
    "frozen": ("#1f6aa5", "#ffffff"),
    "sensitive": ("#f2e35c", "#2e2a00"),
    "healthy": ("#d3e5de", "#1f3a33"),
}
OTHER_COLORS = ("#e4e2dc", "#1f2023")


def default_choice(tables: Tables) -> dict[str, Any]:
    """Return what is shown first: the longest length, and the first text and kind with that length."""
    choice: dict[str, Any] = {"text": "", "length": None, "normalizer": "", "kind": ""}
    heads = tables["heads"]
    for name in ("length", "normalizer", "text", "kind"):
        values = distinct(heads, name)  # in the remaining rows: a text may lack a length
        if values:
            if name == "length":
                choice[name] = values[-1]
            else:
                choice[name] = MODEL if MODEL in values else values[0]
            heads = chosen_rows(heads, {name: choice[name]})
    return choice


def column(table: pa.Table, name: str) -> NDArray[np.float64]:
    """Return a column as floats; missing values, and columns that the table does not have, are NaN."""
    index = table.schema.get_field_index(name)  # a list of all names takes longer than the column
    if index < 0:
        return np.full(table.num_rows, np.nan)
    return np.asarray(table.column(index).to_numpy(zero_copy_only=False), dtype=np.float64)


def chosen_rows(table: pa.Table, choice: Mapping[str, Any]) -> pa.Table:
    """Return the rows that have the chosen values in all columns of the table."""
    for name, value in choice.items():
        if name in table.column_names:
            values = table.column(name)
            table = table.filter(pc.is_null(values) if value is None else pc.equal(values, value))
    return table


def measured_rows(table: pa.Table, choice: Mapping[str, Any]) -> pa.Table:
    """Return the chosen rows; raise ValueError if there are none."""
    rows = chosen_rows(table, choice)
    if not rows.num_rows:
        raise ValueError(
            f"no head was measured with {', '.join(f'{name} {value!r}' for name, value in choice.items())}"
        )
    return rows


def relative_distances(top_n: pa.Table) -> pa.Table:
    """Divide the bounds by (n - N) ||s||, as the distance itself is, so that heads and lengths are comparable."""
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = column(top_n, "relative_distance") / column(top_n, "d_tilde")
        for name in DISTANCES:
            scaled = pa.array(column(top_n, name) * factor, from_pandas=True)
            top_n = top_n.set_column(top_n.column_names.index(name), name, scaled)
    return top_n


def distinct(table: pa.Table, name: str) -> list[Any]:
    """Return distinct values in order of appearance; lengths by size, None (a whole input) first."""
    values = list(dict.fromkeys(table.column(name).to_pylist()))
    return sorted(values, key=lambda length: length or 0) if name == "length" else values
