"""Do verdicts hold on other passages of a text, and under other random seeds? One number to check before quoting one.

A head counts as judged where some run gives it a verdict other than "undecided". It keeps its verdict if no other run
gives it another one; it is the same everywhere if every run gives it that verdict, none of them "undecided".
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from attnorm.analysis.result import Analysis
from attnorm.analysis.verdicts.rows import head_id, head_rows, representative
from attnorm.analysis.verdicts.thresholds import UNDECIDED

Head = tuple[str, int, int]


@dataclass(frozen=True, kw_only=True)
class Stability:
    runs: int
    heads: int
    judged: int  # with a verdict in at least one run
    kept: int  # of these, contradicted by no run
    same: int  # of these, with the same verdict in every run
    again: float  # share of the heads judged in one run that have the same verdict in another, over pairs of runs
    undecided: float  # heads per run, on average
    one_window: int  # heads that would keep their verdict if each run were judged by its first window alone
    changing: dict[str, dict[str, int]]  # "kind layer head" -> verdict -> runs, of heads that do not keep theirs

    @property
    def rate(self) -> float:
        return self.kept / self.judged if self.judged else float("nan")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rate": self.rate}


def passages(content: str, count: int) -> dict[str, str]:
    """Equal parts of a text, in its order, each cut at a space."""
    if count < 1 or len(content) < 2 * count:
        raise ValueError(f"expected a text of at least {2 * max(count, 1)} characters for {count} passages")
    edges = [0]
    for number in range(1, count):
        wanted = number * len(content) // count
        space = content.find(" ", wanted)
        edges.append(wanted if space < 0 else space + 1)
    edges.append(len(content))
    return {f"passage {n + 1} of {count}": content[edges[n] : edges[n + 1]] for n in range(count)}


def stability(runs: Mapping[str, Analysis]) -> Stability:
    """runs: analyses of one model, by name."""
    if len(runs) < 2:
        raise ValueError(f"expected at least two runs to compare, got {len(runs)}")
    verdicts = [_verdicts(run) for run in runs.values()]
    common = set.intersection(*(set(one) for one in verdicts))
    found = {head: [one[head] for one in verdicts] for head in sorted(common)}
    given = {head: {name for name in names if name not in (UNDECIDED, None)} for head, names in found.items()}
    judged = [head for head, names in given.items() if names]
    kept = [head for head in judged if len(given[head]) == 1]
    first = [_first_windows(run) for run in runs.values()]
    return Stability(
        runs=len(runs),
        heads=len(found),
        judged=len(judged),
        kept=len(kept),
        same=sum(len(set(found[head])) == 1 for head in kept),
        again=_again(list(found.values()), len(runs)),
        undecided=sum(names.count(UNDECIDED) for names in found.values()) / len(runs),
        one_window=sum(len({one.get(head) for one in first}) == 1 for head in found),
        changing={
            f"{kind} layer {layer} head {head}": dict(Counter(str(name) for name in found[kind, layer, head]))
            for kind, layer, head in judged
            if len(given[kind, layer, head]) > 1
        },
    )


def _again(verdicts: list[list[str | None]], runs: int) -> float:
    """ "undecided" in the other run counts as another verdict."""
    pairs = [
        (names[one], names[other])
        for names in verdicts
        for one in range(runs)
        for other in range(runs)
        if one != other and names[one] not in (UNDECIDED, None)
    ]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else float("nan")


def _verdicts(run: Analysis) -> dict[Head, str | None]:
    heads, _ = representative(head_rows(run.heads))
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
