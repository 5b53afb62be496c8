"""Search for counterexamples to every claim: random rows, structured rows, and ascent on the violation itself.

A round is a function of (claim, seed, round number), so any counterexample can be reproduced from these three and its
row. Ascent is gradient ascent on the log of the ratio if the claim is differentiable; otherwise random changes that
increase the ratio are kept. The number of rounds within the time budget depends on the machine; the result of a round
does not.
"""

import math
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnorm.engines.execution import one_thread
from attnorm_lab.errata.catalogue import Claim, ClaimCase, claims
from attnorm_lab.errata.catalogue.claim import draw_case

ROUNDING = 1e-9  # ratios above 1 by no more than this are rounding errors of float64
FIRST_ROUNDS = 9  # every strategy three times, whatever the budget
ENOUGH_VIOLATIONS = 1000  # after which a refuted claim is not searched further
ASCENT_STEPS = 30
MAX_LOG_DIAL = 7.0  # an ascent to steps of 1e-15 would climb on rounding, not on the claim
VACUOUS_SHARE = 0.3  # a bound is called vacuous if it says nothing on at least this share of random rows

STRATEGIES = ("random", "structured", "ascent")


@dataclass(frozen=True)
class Counterexample:
    """The smallest case found for which the claim fails; `replay` computes it again."""

    claim: str
    seed: int
    round: int
    row: int
    ratio: float
    keys: int
    top_n: int
    width: int
    temperature: float

    @property
    def address(self) -> str:
        """claim:seed:round:row, as `attnorm lab verify --replay` takes it."""
        return f"{self.claim}:{self.seed}:{self.round}:{self.row}"


@dataclass(frozen=True)
class Finding:
    """The result of the search for one claim."""

    claim: Claim
    tried: int = 0  # rows; an ascent counts as the row it ends at
    rounds: int = 0
    violations: int = 0
    worst_ratio: float = -math.inf
    reached: tuple[float, ...] = ()  # the worst ratio to each bound
    says_nothing_share: float | None = None
    tightness: tuple[float, float, float] | None = None  # 5 %, 50 %, 95 % of the ratio over random rows
    counterexample: Counterexample | None = None

    @property
    def verdict(self) -> str:
        """The result in words; in capitals if it contradicts the table."""
        claim = self.claim
        if not claim.searched:
            return "argument"
        if self.tried == 0:
            return "NOT TRIED"
        if claim.status == "false":
            return "refuted" if self.violations else "NOT REFUTED"
        if self.violations:
            return "VIOLATED"
        if claim.status == "vacuous":
            return "says nothing" if (self.says_nothing_share or 0) >= VACUOUS_SHARE else "NOT VACUOUS"
        if any(least is not None and ratio < least for least, ratio in zip(claim.attained, self.reached, strict=False)):
            return "NOT ATTAINED"
        return "survived"

    @property
    def stands(self) -> bool:
        """Whether the table's status of the claim agrees with the search."""
        return not self.verdict.isupper()


class SearchInterrupted(KeyboardInterrupt):
    """Raised by Ctrl-C during `verify`; `findings` holds the results so far."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("the search was interrupted")
        self.findings = findings


def verify(
    which: Iterable[Claim] | None = None,
    *,
    budget_seconds: float = 60.0,
    seed: int = 0,
    first_rounds: int = FIRST_ROUNDS,
    progress: Callable[[Claim, float], None] | None = None,
) -> list[Finding]:
    """Search every claim (or those given) for about the time given.

    `first_rounds` rounds of each claim are run whatever the budget; the remaining time is given to the claims with the
    least time so far, except those well refuted. `progress` is called with the current claim and
    the share of the work done.
    """
    if not budget_seconds > 0:
        raise ValueError(f"budget_seconds must be positive, got {budget_seconds}")
    if first_rounds < 1:
        raise ValueError(f"first_rounds must be at least 1, got {first_rounds}")
    searches = [_Search(claim, seed) for claim in (claims() if which is None else which)]
    try:
        with one_thread():
            _search_all(
                [search for search in searches if search.claim.searched], budget_seconds, first_rounds, progress
            )
    except KeyboardInterrupt:
        raise SearchInterrupted([search.finding() for search in searches]) from None
    return [search.finding() for search in searches]


def _search_all(
    active: "list[_Search]",
    budget_seconds: float,
    first_rounds: int,
    progress: Callable[[Claim, float], None] | None,
) -> None:
    start = time.monotonic()

    def report(search: _Search, share: float) -> None:
        if progress is not None:
            progress(search.claim, min(max(share, (time.monotonic() - start) / budget_seconds), 1.0))

    for index, search in enumerate(active):
        report(search, index / (2 * len(active)))
        for _ in range(first_rounds):
            search.run_round()
    while time.monotonic() - start < budget_seconds:
        active = [search for search in active if search.violations < ENOUGH_VIOLATIONS]
        if not active:
            break
        search = min(active, key=lambda s: s.seconds)
        report(search, 0.5)
        search.run_round()


def replay(claim: Claim, seed: int, round_number: int) -> tuple[ClaimCase, Tensor]:
    """Return the case of one round and its ratios, as in the search."""
    if not claim.searched:
        raise ValueError(f"{claim.id} is proved by an argument and has no rounds to replay. See {claim.proof}")
    if round_number < 0:
        raise ValueError(f"expected a round of at least 0, got {round_number}")
    with one_thread():
        case, ratios = _Search(claim, seed).case_of(round_number)
    return case, ratios.amax(-1)


def table_stands(findings: Sequence[Finding]) -> bool:
    return all(finding.stands for finding in findings)


class _Search:
    """The state of the search for one claim."""

    def __init__(self, claim: Claim, seed: int) -> None:
        self.claim, self.seed = claim, seed
        self.rounds = self.tried = self.violations = self.random_rows = self.silent_rows = 0
        self.seconds = 0.0
        self.reached: Tensor | None = None
        self.random_ratios: list[Tensor] = []
        self.smallest: Counterexample | None = None

    def case_of(self, round_number: int) -> tuple[ClaimCase, Tensor]:
        """Return the case of a round, and its ratios (rows, bounds)."""
        cycle, step = divmod(round_number, len(STRATEGIES))
        strategy = STRATEGIES[step]
        # Ascents start from structured and from random rows in turn.
        structured = strategy == "structured" or (strategy == "ascent" and cycle % 2 == 0)
        # The seed does not depend on the claim's name: a claim and its correction get the same rows.
        seed = zlib.crc32(f"{self.seed}/{round_number}".encode())
        case = draw_case(seed, self.claim.sizes, structured=structured)
        if strategy == "ascent":
            case = _ascend(self._ratio, case) if self.claim.differentiable else _climb(self._ratio, case, seed)
        with torch.no_grad():
            return case, self._by_bound(case)

    def _by_bound(self, case: ClaimCase) -> Tensor:
        assert self.claim.ratio is not None
        ratio = self.claim.ratio(case)
        return ratio if ratio.dim() == 2 else ratio.unsqueeze(-1)

    def _ratio(self, case: ClaimCase) -> Tensor:
        return self._by_bound(case).amax(-1)

    def run_round(self) -> None:
        began = time.monotonic()
        case, by_bound = self.case_of(self.rounds)
        reached = torch.nan_to_num(by_bound, nan=-torch.inf, posinf=torch.inf).amax(0)
        self.reached = reached if self.reached is None else torch.maximum(self.reached, reached)
        ratios = by_bound.amax(-1)
        applies = ~torch.isnan(ratios)
        self.tried += int(applies.sum())
        if STRATEGIES[self.rounds % len(STRATEGIES)] == "random":
            self.random_ratios.append(ratios[applies])
            if self.claim.says_nothing is not None:
                silent = self.claim.says_nothing(case)[applies]
                self.silent_rows += int(silent.nansum())
                self.random_rows += int((~silent.isnan()).sum())
        broken = applies & (ratios > 1 + ROUNDING)
        self.violations += int(broken.sum())
        if bool(broken.any()):
            self._keep_smallest(case, torch.where(broken, ratios, -torch.inf))
        self.rounds += 1
        self.seconds += time.monotonic() - began

    def _keep_smallest(self, case: ClaimCase, ratios: Tensor) -> None:
        row = int(ratios.argmax())
        counterexample = Counterexample(
            claim=self.claim.id,
            seed=self.seed,
            round=self.rounds,
            row=row,
            ratio=float(ratios[row]),
            keys=case.keys,
            top_n=case.top_n,
            width=case.width,
            temperature=case.temperature,
        )
        if self.smallest is None or _size(counterexample) < _size(self.smallest):
            self.smallest = counterexample

    def finding(self) -> Finding:
        reached = () if self.reached is None else tuple(self.reached.tolist())
        return Finding(
            claim=self.claim,
            tried=self.tried,
            rounds=self.rounds,
            violations=self.violations,
            worst_ratio=max(reached, default=-math.inf),
            reached=reached,
            says_nothing_share=self.silent_rows / self.random_rows if self.random_rows else None,
            tightness=_quantiles(self.random_ratios),
            counterexample=self.smallest,
        )


def _size(counterexample: Counterexample) -> tuple[int, int, int]:
    return counterexample.keys, counterexample.width, counterexample.top_n


def _quantiles(ratios: list[Tensor]) -> tuple[float, float, float] | None:
    values = torch.cat(ratios) if ratios else torch.empty(0)
    if not values.numel():
        return None
    # Nearest rank: an infinite ratio is a value like any other.
    ordered = values.sort().values
    low, middle, high = (float(ordered[round(share * (len(ordered) - 1))]) for share in (0.05, 0.5, 0.95))
    return low, middle, high


def _ascend(ratio: Callable[[ClaimCase], Tensor], case: ClaimCase) -> ClaimCase:
    """Maximize the log ratio by gradient ascent over all numbers of the case; keep the best point of each row."""
    free = [t.clone().requires_grad_() for t in _numbers(case)]
    optimizer = torch.optim.Adam(free, lr=0.1)
    best, best_ratio = case, torch.full_like(case.dial, -torch.inf)
    for _ in range(ASCENT_STEPS):
        trial = _with_numbers(case, free)
        trial_ratio = ratio(trial)
        best, best_ratio = _better(best, best_ratio, trial, trial_ratio.detach())
        usable = torch.isfinite(trial_ratio) & (trial_ratio > 0)
        if not trial_ratio.requires_grad or not bool(usable.any()):
            break
        optimizer.zero_grad()
        (-torch.log(torch.where(usable, trial_ratio, 1.0))).sum().backward()
        for parameter in free:
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
    return best


def _climb(ratio: Callable[[ClaimCase], Tensor], case: ClaimCase, seed: int) -> ClaimCase:
    """Change each row at random, and keep changes that increase the ratio."""
    generator = torch.Generator().manual_seed(seed + 1)

    def drawn(like: Tensor, size: Tensor) -> Tensor:
        step = torch.randn(like.shape, generator=generator, dtype=like.dtype)
        return step * size.reshape(-1, *([1] * (like.dim() - 1)))

    with torch.no_grad():
        best, best_ratio = case, ratio(case)
        steps = [torch.zeros_like(t) for t in _numbers(case)]
        helped = torch.zeros_like(case.dial, dtype=torch.bool)
        for _ in range(ASCENT_STEPS // 2):
            # A change that helped is tried again; the others give way to new ones, of sizes from 0.03 to 1.
            size = 10 ** (-1.5 * torch.rand(case.dial.shape, generator=generator, dtype=case.dial.dtype))
            steps = [_choose_rows(helped, old, drawn(old, size)) for old in steps]
            trial = _with_numbers(best, [t + step for t, step in zip(_numbers(best), steps, strict=True)])
            before = best_ratio
            best, best_ratio = _better(best, best_ratio, trial, ratio(trial))
            helped = best_ratio > before
    return best


def _numbers(case: ClaimCase) -> list[Tensor]:
    """Return the numbers of a case that an ascent may change, without constraints."""
    return [case.logits, case.vectors, case.dial.log(), case.matrices]


def _with_numbers(case: ClaimCase, numbers: list[Tensor]) -> ClaimCase:
    logits, vectors, log_dial, matrices = numbers
    dial = log_dial.clamp(-MAX_LOG_DIAL, MAX_LOG_DIAL).exp()
    return replace(case, logits=logits, vectors=vectors, dial=dial, matrices=matrices)


def _choose_rows(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(rows.reshape(-1, *([1] * (new.dim() - 1))), new, old)


def _better(best: ClaimCase, best_ratio: Tensor, trial: ClaimCase, trial_ratio: Tensor) -> tuple[ClaimCase, Tensor]:
    """Return for each row the case with the higher ratio."""
    gain = torch.nan_to_num(trial_ratio, nan=-torch.inf) > torch.nan_to_num(best_ratio, nan=-torch.inf)
    merged = replace(
        best,
        logits=_choose_rows(gain, trial.logits.detach(), best.logits),
        vectors=_choose_rows(gain, trial.vectors.detach(), best.vectors),
        dial=_choose_rows(gain, trial.dial.detach(), best.dial),
        matrices=_choose_rows(gain, trial.matrices.detach(), best.matrices),
    )
    return merged, torch.where(gain, trial_ratio, best_ratio)
