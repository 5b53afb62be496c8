"""Search for counterexamples to every claim: random rows, structured rows, and ascent on the violation itself.

A round is a function of (claim, seed, round number): any counterexample can be made again from these three. Ascent is
gradient ascent on the log of the ratio where the claim is differentiable, otherwise keeping random changes that help.
"""

import math
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnorm.theory.catalogue import Case, Claim, claims
from attnorm.theory.catalogue.cases import draw_case

ROUNDING = 1e-9  # a ratio this little above 1 is float64 rounding
FIRST_ROUNDS = 9  # every strategy three times, whatever the budget
ENOUGH_VIOLATIONS = 1000  # after which a refuted claim is left alone
ASCENT_STEPS = 30
VACUOUS_SHARE = 0.5  # a bound is called vacuous if it says nothing on at least this share of random rows

STRATEGIES = ("random", "structured", "ascent")


@dataclass(frozen=True)
class Counterexample:
    """The smallest case found on which the claim fails; `replay` makes it again."""

    claim: str
    seed: int
    round: int
    row: int
    ratio: float
    keys: int
    top_n: int
    width: int
    temperature: float


@dataclass(frozen=True)
class Finding:
    """What the search found on one claim."""

    claim: Claim
    tried: int = 0
    rounds: int = 0
    violations: int = 0
    worst_ratio: float = -math.inf
    says_nothing_share: float | None = None
    tightness: tuple[float, float, float] | None = None  # 5 %, 50 %, 95 % of the ratio over random rows
    counterexample: Counterexample | None = None

    @property
    def stands(self) -> bool:
        """Whether the table's status of the claim agrees with the search."""
        if not self.claim.searched:
            return True
        if self.tried == 0:
            return False
        if self.claim.status == "false":
            return self.violations > 0
        if self.claim.status == "vacuous" and (self.says_nothing_share or 0) < VACUOUS_SHARE:
            return False
        return self.violations == 0


def verify(
    which: Iterable[Claim] | None = None,
    *,
    budget_seconds: float = 60.0,
    seed: int = 0,
    progress: Callable[[Claim, float], None] | None = None,
) -> list[Finding]:
    """Search every claim (or those given) for the time given; the same seed and rounds give the same findings.

    `progress` is called with the claim at work and the share of the work done. Claims marked false stop being searched
    once well refuted; the time goes to those that must survive.
    """
    if not budget_seconds > 0:
        raise ValueError(f"budget_seconds must be positive, got {budget_seconds}")
    searches = [_Search(claim, seed) for claim in (claims() if which is None else which)]
    start = time.monotonic()

    def report(search: _Search, share: float) -> None:
        if progress is not None:
            progress(search.claim, min(share, 1.0))

    active = [search for search in searches if search.claim.searched]
    for index, search in enumerate(active):
        for _ in range(FIRST_ROUNDS):
            search.run_round()
        report(search, max((index + 1) / (2 * len(active)), (time.monotonic() - start) / budget_seconds))
    while (elapsed := time.monotonic() - start) < budget_seconds:
        active = [search for search in active if search.violations < ENOUGH_VIOLATIONS]
        if not active:
            break
        search = min(active, key=lambda s: s.seconds)
        search.run_round()
        report(search, elapsed / budget_seconds)
    return [search.finding() for search in searches]


def replay(claim: Claim, seed: int, round_number: int) -> tuple[Case, Tensor]:
    """The case of one round and its ratios, as the search saw them."""
    search = _Search(claim, seed)
    return search.case_of(round_number)


class _Search:
    def __init__(self, claim: Claim, seed: int) -> None:
        self.claim, self.seed = claim, seed
        self.rounds = self.tried = self.violations = self.random_rows = self.silent_rows = 0
        self.seconds = 0.0
        self.worst = -math.inf
        self.random_ratios: list[Tensor] = []
        self.smallest: Counterexample | None = None

    def case_of(self, round_number: int) -> tuple[Case, Tensor]:
        strategy = STRATEGIES[round_number % len(STRATEGIES)]
        seed = zlib.crc32(f"{self.claim.id}/{self.seed}/{round_number}".encode())
        case = draw_case(seed, self.claim.most_keys, structured=strategy == "structured" or round_number % 2 == 1)
        if strategy == "ascent":
            case = _climb(self._ratio, case, seed) if not self.claim.differentiable else _ascend(self._ratio, case)
        with torch.no_grad() if self.claim.differentiable else torch.enable_grad():
            return case, self._ratio(case).detach()

    def _ratio(self, case: Case) -> Tensor:
        assert self.claim.ratio is not None
        return self.claim.ratio(case)

    def run_round(self) -> None:
        began = time.monotonic()
        case, ratios = self.case_of(self.rounds)
        applies = ~torch.isnan(ratios)
        self.tried += int(applies.sum())
        if self.rounds % len(STRATEGIES) == 0:
            self.random_ratios.append(ratios[applies])
            if self.claim.says_nothing is not None:
                silent = self.claim.says_nothing(case)[applies]
                self.silent_rows += int(silent.nansum())
                self.random_rows += int((~silent.isnan()).sum())
        if bool(applies.any()):
            self.worst = max(self.worst, float(ratios[applies].max()))
        broken = applies & (ratios > 1 + ROUNDING)
        self.violations += int(broken.sum())
        if bool(broken.any()):
            self._keep_smallest(case, torch.where(broken, ratios, -torch.inf))
        self.rounds += 1
        self.seconds += time.monotonic() - began

    def _keep_smallest(self, case: Case, ratios: Tensor) -> None:
        row = int(ratios.argmax())
        found = Counterexample(
            claim=self.claim.id,
            seed=self.seed,
            round=self.rounds,
            row=row,
            ratio=float(ratios[row]),
            keys=case.keys,
            top_n=case.top_n,
            width=case.vectors.shape[-1],
            temperature=case.temperature,
        )
        if self.smallest is None or (found.keys, found.width) < (self.smallest.keys, self.smallest.width):
            self.smallest = found

    def finding(self) -> Finding:
        ratios = torch.cat(self.random_ratios) if self.random_ratios else torch.empty(0)
        ratios = ratios[torch.isfinite(ratios)].double()
        quantiles = None
        if ratios.numel():
            low, middle, high = torch.quantile(ratios, torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
            quantiles = (low, middle, high)
        return Finding(
            claim=self.claim,
            tried=self.tried,
            rounds=self.rounds,
            violations=self.violations,
            worst_ratio=self.worst,
            says_nothing_share=self.silent_rows / self.random_rows if self.random_rows else None,
            tightness=quantiles,
            counterexample=self.smallest,
        )


def _ascend(ratio: Callable[[Case], Tensor], case: Case) -> Case:
    """Gradient ascent on log ratio in logits, vectors and dial; the best point of each row is kept."""
    free = [t.clone().requires_grad_() for t in (case.logits, case.vectors, case.dial.log())]
    optimizer = torch.optim.Adam(free, lr=0.1)
    best, best_ratio = case, torch.full_like(case.dial, -torch.inf)
    for _ in range(ASCENT_STEPS):
        trial = replace(case, logits=free[0], vectors=free[1], dial=free[2].exp())
        found = ratio(trial)
        best, best_ratio = _better(best, best_ratio, trial, found.detach())
        usable = torch.isfinite(found) & (found > 0)
        if not found.requires_grad or not bool(usable.any()):
            break
        optimizer.zero_grad()
        (-torch.log(torch.where(usable, found, 1.0))).sum().backward()  # type: ignore[no-untyped-call]
        for parameter in free:
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
    return best


def _climb(ratio: Callable[[Case], Tensor], case: Case, seed: int) -> Case:
    """Random changes of each row, kept where they raise the ratio."""
    generator = torch.Generator().manual_seed(seed + 1)

    def moved(t: Tensor, size: float) -> Tensor:
        return t + size * torch.randn(t.shape, generator=generator, dtype=t.dtype)

    best, best_ratio = case, ratio(case).detach()
    for step in range(ASCENT_STEPS // 3):
        size = 0.5 / (1 + step)
        trial = replace(
            best,
            logits=moved(best.logits, size),
            vectors=moved(best.vectors, size),
            dial=moved(best.dial.log(), size).exp(),
        )
        best, best_ratio = _better(best, best_ratio, trial, ratio(trial).detach())
    return best


def _better(best: Case, best_ratio: Tensor, trial: Case, found: Tensor) -> tuple[Case, Tensor]:
    """Row by row the case with the higher ratio."""
    gain = torch.nan_to_num(found, nan=-torch.inf) > torch.nan_to_num(best_ratio, nan=-torch.inf)

    def pick(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(gain.reshape(-1, *([1] * (new.dim() - 1))), new.detach(), old)

    merged = replace(
        best,
        logits=pick(trial.logits, best.logits),
        vectors=pick(trial.vectors, best.vectors),
        dial=pick(trial.dial, best.dial),
    )
    return merged, torch.where(gain, found, best_ratio)


def table_stands(findings: Sequence[Finding]) -> bool:
    return all(finding.stands for finding in findings)
