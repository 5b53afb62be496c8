"""What the checks try and what they measure: `python -m tests.normalizers.tried` writes tried.json again.

The cases of a check are its promise: prime sizes, hidden keys in every place, logits of 1e4. A case that is no longer
tried leaves no failing test behind, so the cases are stored.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnorm.normalizers import Normalizer
from attnorm.normalizers.block import Positions
from attnorm.normalizers.checked_normalizer import CheckedNormalizer
from attnorm.normalizers.contract_checks import CHECKS, _lifted, _random_rows, _two_level_rows
from attnorm.normalizers.softmax import Softmax

STORED = Path(__file__).with_suffix(".json")
# Not among them: checks whose calls depend on autograd's own checks, on ties of a search, or on a compiler.
SPIED = [name for name in CHECKS if name not in ("first_derivative", "second_derivative", "compiled", "lipschitz")]


class Spy(Normalizer):
    """Softmax that keeps an outline of every call."""

    seen: list[list[float]]

    def forward(
        self,
        logits: Tensor,
        mask: Tensor | None = None,
        *,
        positions: Positions | None = None,
        hidden_states: Tensor | None = None,
    ) -> Tensor:
        at = [] if positions is None else [outline(positions.query), outline(positions.key)]
        parts = [outline(part) for part in (logits, mask, hidden_states) if part is not None]
        self.seen.append([logits.element_size(), logits.dim(), *torch.tensor(parts + at).flatten().tolist()])
        found: Tensor = super().forward(logits, mask, positions=positions, hidden_states=hidden_states)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> "Spy":
        return self  # so that all calls are in one list


def outline(values: Tensor) -> tuple[float, float, float]:
    """The number of values, of those that are finite, and their sum weighted by place."""
    flat = values.detach().double().flatten()
    finite = torch.where(flat.isfinite() & (flat.abs() < 1e20), flat, 0.0)
    return float(len(flat)), float((finite != 0).sum()), float(finite @ torch.linspace(1, 2, len(flat)).double())


def calls(check: str) -> list[float]:
    """How often the check calls a normalizer, and sums over what it passes."""
    spy = Spy(Softmax(), name="spy")
    spy.seen = []
    assert not list(CHECKS[check](CheckedNormalizer(spy, heads=2, width=3)))
    width = max(map(len, spy.seen), default=0)
    table = torch.tensor([[*row, *[0.0] * (width - len(row))] for row in spy.seen], dtype=torch.float64)
    order = torch.linspace(1, 2, len(table), dtype=torch.float64)
    return [len(table), *(order @ table).tolist()] if len(table) else [0]


def searched_rows() -> list[list[float]]:
    """Of the rows on which Lipschitz constants are measured."""
    return [list(outline(_lifted(torch.cat([_random_rows(n), _two_level_rows(n)])))) for n in (1, 2, 5, 31)]


def complaints(check: str, normalizer: Normalizer) -> list[float]:
    """The numbers in what a check says about a normalizer, without those as small as rounding."""
    if check not in {*SPIED, "lipschitz"}:
        return []
    try:
        said = "; ".join(dict.fromkeys(CHECKS[check](CheckedNormalizer.of(normalizer, 2, None))))
    except Exception:
        return []
    found = map(float, re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.])", said))
    return [number for number in found if number == 0 or abs(number) >= 1e-3][:40]


def main() -> None:
    from tests.normalizers.test_check import BROKEN

    found = {
        "calls": {name: calls(name) for name in SPIED},
        "rows": searched_rows(),
        "complaints": [complaints(name, normalizer) for name, normalizer in BROKEN],
    }
    text = json.dumps(json.loads(json.dumps(found), parse_float=lambda text: float(f"{float(text):.7g}")))
    STORED.write_text(re.sub(r"\], (?=[\"\[])", "],\n", text) + "\n", encoding="utf-8")
    sys.stdout.write(f"{len(SPIED)} checks, {len(BROKEN)} broken normalizers\n")


if __name__ == "__main__":
    main()
