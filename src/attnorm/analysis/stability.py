"""Stability of verdicts: compare the verdicts of heads on several passages of a text, and with several random seeds.

A head is judged in a run if its verdict there is not "undecided". Two rates compare pairs of runs:

    again           of the heads judged in one run, the share with the same verdict in another; an "undecided" there
                    counts as a change
    uncontradicted  of the heads judged in one run, the share with the same verdict or "undecided" in another

Over all runs, of the heads judged in at least one: `kept` counts those with no second verdict beside "undecided",
`same` those with one verdict in every run.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from attnorm.analysis.result import Analysis
from attnorm.analysis.tables import WINDOW_NUMBERS
from attnorm.analysis.verdicts.rows import head_id, head_rows, representative_rows
from attnorm.analysis.verdicts.thresholds import UNDECIDED

Head = tuple[str, int, int]


@dataclass(frozen=True, kw_only=True)
class Stability:
    runs: int
    heads: int
    windows: int  # of each run, the most of any
    length: int  # tokens of a window, the longest of any
    judged: int  # in at least one run
    kept: int  # of these, contradicted by no run
    same: int  # of these, with the same verdict in every run
    again: float  # over pairs of runs, see above
    uncontradicted: float  # over pairs of runs, see above
    undecided: float  # heads per run, on average
    one_window: int  # heads that would keep their verdict if each run were judged by its first window alone
    changing: dict[str, dict[str, int]]  # "kind layer head" -> verdict -> runs, of heads that do not keep theirs

    @property
    def rate(self) -> float:
        return self.kept / self.judged if self.judged else float("nan")

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; a rate is None if no head was judged."""
        plain = {**asdict(self), "rate": self.rate}
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value for name, value in plain.items()
        }


def passages(content: str, count: int) -> dict[str, str]:
    """Equal parts of a text, in its order, each cut at a space."""
    if count < 1 or len(content) < 2 * count:
        least = 2 * max(count, 1)
        raise ValueError(
            f"expected a text of at least {least} characters for {count} passages, got {len(content)} characters"
        )
    edges = [0]
    for number in range(1, count):
        target = number * len(content) // count
        space = content.find(" ", target)
        edges.append(target if space < 0 else space + 1)
    edges.append(len(content))
    return {f"passage {n + 1} of {count}": content[edges[n] : edges[n + 1]] for n in range(count)}


def stability(runs: Mapping[str, Analysis]) -> Stability:
    """Compare the verdicts of several analyses of one model, given by name."""
    if len(runs) < 2:
        raise ValueError(f"expected at least two runs to compare, got {len(runs)}")
    verdicts = [_verdicts(run) for run in runs.values()]
    common = set.intersection(*(set(run_verdicts) for run_verdicts in verdicts))
    verdicts_by_head = {head: [run_verdicts[head] for run_verdicts in verdicts] for head in sorted(common)}
    decided = {
        head: {name for name in names if name not in (UNDECIDED, None)} for head, names in verdicts_by_head.items()
    }
    judged = [head for head, names in decided.items() if names]
    kept = [head for head in judged if len(decided[head]) == 1]
    first = [_first_windows(run) for run in runs.values()]
    again, uncontradicted = _agreement_over_pairs(list(verdicts_by_head.values()), len(runs))
    return Stability(
        runs=len(runs),
        heads=len(verdicts_by_head),
        windows=max((text.get("windows") or 1 for run in runs.values() for text in run.manifest["texts"]), default=1),
        length=max((row["length"] or 0 for run in runs.values() for row in head_rows(run.heads)), default=0),
        judged=len(judged),
        kept=len(kept),
        same=sum(len(set(verdicts_by_head[head])) == 1 for head in kept),
        again=again,
        uncontradicted=uncontradicted,
        undecided=sum(names.count(UNDECIDED) for names in verdicts_by_head.values()) / len(runs),
        one_window=sum(len({window_verdicts.get(head) for window_verdicts in first}) == 1 for head in verdicts_by_head),
        changing={
            f"{kind} layer {layer} head {head}": dict(
                Counter(str(name) for name in verdicts_by_head[kind, layer, head])
            )
            for kind, layer, head in judged
            if len(decided[kind, layer, head]) > 1
        },
    )


def same_numbers(run: Analysis, window: Analysis) -> bool:
    """Whether a run of one window gives the numbers that this window has in `run`, bit for bit."""
    columns = ["kind", "layer", "head", "start", *WINDOW_NUMBERS]
    run_rows, window_rows = (
        {(row["start"], head_id(row)): row for row in analysis.windows.select(columns).to_pylist()}
        for analysis in (run, window)
    )
    return bool(window_rows) and all(
        str(run_rows.get(key)) == str(row) for key, row in window_rows.items()
    )  # NaN equals NaN as text


def _agreement_over_pairs(verdicts: list[list[str | None]], runs: int) -> tuple[float, float]:
    """`again` and `uncontradicted`: over ordered pairs of runs, the first of which judges the head."""
    pairs = [
        (names[first], names[second])
        for names in verdicts
        for first in range(runs)
        for second in range(runs)
        if first != second and names[first] not in (UNDECIDED, None)
    ]
    if not pairs:
        return float("nan"), float("nan")
    alike = sum(a == b for a, b in pairs)
    return alike / len(pairs), (alike + sum(b == UNDECIDED for _, b in pairs)) / len(pairs)


def _verdicts(run: Analysis) -> dict[Head, str | None]:
    heads, _ = representative_rows(head_rows(run.heads))
    return {head_id(row): row["verdict"] for row in heads}


def _first_windows(run: Analysis) -> dict[Head, str | None]:
    rows = run.windows.select(
        ["text", "length", "normalizer", "kind", "layer", "head", "window", "verdict"]
    ).to_pylist()
    longest = max((row["length"] for row in rows), default=0)
    return {
        head_id(row): row["verdict"]
        for row in rows
        if row["window"] == 0 and row["length"] == longest and row["normalizer"] == "model"
    }
