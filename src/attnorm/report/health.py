"""The doctor's findings and their terminal form."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attnorm.report.benchmarks import Machine


@dataclass(frozen=True, kw_only=True)
class Optional:
    """Something that is not required, whether it is here, and what it is good for."""

    name: str
    version: str | None  # None: not here
    enables: str


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was tried on this machine."""

    promise: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Health:
    machine: Machine
    versions: dict[str, str]
    devices: tuple[str, ...]
    optional: tuple[Optional, ...]
    checks: tuple[Check, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fields, and whether everything held."""
        return {"well": self.well, **asdict(self)}

    @property
    def well(self) -> bool:
        return all(check.passed for check in self.checks)


def health_tables(health: Health) -> RenderableType:
    here = Table(title="This machine", show_header=False, title_justify="left")
    machine = health.machine
    for name, value in [
        *health.versions.items(),
        ("system", machine.system),
        ("processor", f"{machine.processor}, {machine.cores} cores, torch uses {machine.threads}"),
        ("devices", ", ".join(health.devices)),
    ]:
        here.add_row(name, value)
    optional = Table(title="Optional", title_justify="left")
    for heading in ("what", "version", "enables"):
        optional.add_column(heading)
    for one in health.optional:
        optional.add_row(one.name, one.version or Text("missing", style="yellow"), one.enables)
    checks = Table(title="Self check", title_justify="left")
    for heading in ("promise", "", "found"):
        checks.add_column(heading)
    for check in health.checks:
        verdict = Text("holds", style="green") if check.passed else Text("BROKEN", style="bold red")
        checks.add_row(check.promise, verdict, check.detail)
    return Group(here, optional, checks)
