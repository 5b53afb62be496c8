"""Check a normalizer, built in or your own, against the contract.

    attnorm.check_normalizer("entmax15")
    attnorm.check_normalizer(compose("entmax15", scale=MyRule()))

It checks everything that the contract requires and that the normalizer's `properties` declare. The checks are the
functions of `attnorm.normalizers.contract_checks`. A check that cannot hold is excepted by name, with a reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from attnorm.normalizers.checked_normalizer import CheckedNormalizer, CheckFunction
from attnorm.normalizers.contract import Mechanism, Normalizer
from attnorm.normalizers.contract_checks import CHECKS
from attnorm.normalizers.declaration import Declaration
from attnorm.normalizers.registry import entries, resolve
from attnorm.text import did_you_mean


@dataclass(frozen=True)
class Check:
    """The outcome of one check. `detail`: what failed, or the reason for an exception."""

    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """The result of `check_normalizer`."""

    normalizer: str
    checks: tuple[Check, ...]

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.passed)

    @property
    def passed(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        lines = [f"{self.normalizer}: {len(self.checks) - len(self.failures)} of {len(self.checks)} checks passed"]
        for check in self.checks:
            detail = f": {check.detail}" if check.detail else ""
            lines.append(f"  {'passed' if check.passed else 'FAILED'}  {check.name}{detail}")
        return "\n".join(lines)


class ContractError(AssertionError):
    """Raised if a normalizer fails checks of the contract; `report` holds all outcomes."""

    def __init__(self, report: Report) -> None:
        failures = "\n".join(f"  {check.name}: {check.detail}" for check in report.failures)
        super().__init__(
            f"{report.normalizer!r} fails {len(report.failures)} of {len(report.checks)} checks\n{failures}\n"
            "Correct the normalizer or what it declares, or pass exceptions={check: reason} for what cannot hold."
        )
        self.report = report


def check_normalizer(
    normalizer: str | Normalizer,
    *,
    heads: int = 2,
    width: int | None = None,
    exceptions: Mapping[str, str] | None = None,
    compile: bool = False,
    raise_on_failure: bool = True,
) -> Report:
    """Check a normalizer against the contract and its own declared properties; raise ContractError where it fails.

    A normalizer given by name is also compared with its declared reference.

    Args:
        heads: Number of heads of the test logits; must match the parameters of the normalizer (default: 2).
        width: Width of the hidden states, if the normalizer reads them.
        exceptions: {check name: reason} for checks that may fail (default: those that its file declares).
        compile: Also compare with torch.compile, which takes seconds (default: False).
        raise_on_failure: Raise ContractError if a check fails; False returns the report (default: True).
    """
    row_normalizer = _row_normalizer(normalizer)
    name = row_normalizer.name
    declared = entries()[name].declaration if name in entries() else Declaration()
    reference = declared.reference if isinstance(normalizer, str) else None
    subject = CheckedNormalizer.of(row_normalizer, heads, width, reference)
    excepted = declared.exceptions if exceptions is None else _check_names(exceptions)
    selected_checks = {check: function for check, function in CHECKS.items() if compile or check != "compiled"}
    checks = []
    for check, function in selected_checks.items():
        if check in excepted:
            checks.append(Check(check, True, f"excepted, {excepted[check]}"))
        elif check == "reference" and reference is None:
            checks.append(Check(check, True, "nothing compared, there is no reference"))
        else:
            checks.append(_run_check(check, function, subject))
        if check == "runs" and not checks[-1].passed:
            break
    report = Report(name, tuple(checks))
    if raise_on_failure and not report.passed:
        raise ContractError(report)
    return report


def _run_check(name: str, function: CheckFunction, subject: CheckedNormalizer) -> Check:
    try:
        complaints = list(function(subject))
    except Exception as error:  # an exception fails this check; the other checks still run
        complaints = [f"raised {type(error).__name__}: {error}"]
        if name == "runs":
            complaints.append(f"tried with heads={subject.heads}, width={subject.width}; pass others if it needs them")
    return Check(name, not complaints, "; ".join(dict.fromkeys(complaints)))


def _row_normalizer(normalizer: str | Normalizer) -> Normalizer:
    resolved = resolve(normalizer)
    if isinstance(resolved, Mechanism):
        raise TypeError(
            f"{resolved.name!r} is a mechanism without rows of weights, to which these checks do not apply. "
            "Compare its output with a dense reference instead."
        )
    return resolved


def _check_names(exceptions: Mapping[str, str]) -> Mapping[str, str]:
    for name in exceptions:
        if name not in CHECKS:
            raise ValueError(f"exceptions: unknown check {name!r}; {did_you_mean(name, CHECKS)}")
    return exceptions
