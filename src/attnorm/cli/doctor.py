"""attnorm doctor: whether attnorm works on this machine."""

import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnorm.attention import attention, choose_engine
from attnorm.cli.output import Json, ProgressBar, show, show_json
from attnorm.engines.dense import dense
from attnorm.engines.inputs import validate_inputs
from attnorm.machine import Machine, this_machine
from attnorm.normalizers.check import check_normalizer
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import available, get


def doctor(as_json: Json = False) -> None:
    """Show versions, devices and optional packages, and check that attnorm works on this machine.

    Exit code 1: a check failed.

    Example: attnorm doctor --json
    """
    with ProgressBar() as progress:
        health = examine(lambda check, done, total: progress("checking", done, total, detail=check))
    if as_json:
        show_json(health.as_dict())
    else:
        show(health_tables(health))
    if not health.well:
        raise typer.Exit(1)


OPTIONAL_PACKAGES = {
    "triton": "torch.compile and our kernels on CUDA",
    "accelerate": "`attnorm lab train`, and the Hugging Face Trainer",
    "pandas": "Analysis.to_pandas",
    "polars": "Analysis.to_polars",
    "lightning": "AttentionMonitor.lightning",
    "soundfile": "`attnorm analyze --audio` of other files than .wav",
    "lm-eval": "RULER and other tasks in `attnorm evaluate`",
    "optuna": "`attnorm lab search`",
    "ray": "`attnorm lab sweep --on ray`",
    "submitit": "`attnorm lab sweep --on slurm`",
    "onnx": "torch.onnx.export",
    "onnxscript": "torch.onnx.export",
    "onnxruntime": "running the exported file",
    "entmax": "the comparison in `attnorm lab bench normalizers`",
}
ENGINES = {
    "fused": "fused: torch SDPA",
    "triton": "triton: one-pass kernels",
    "sparse": "sparse: threshold kernels",
    "blocked": "blocked: blocks of queries",
    "its own": "mechanisms: their own function",
}
CLOSE = 1e-5  # float32 attention of unit normal inputs


@dataclass(frozen=True, kw_only=True)
class Optional:
    """An optional package or tool, its version, and what it enables."""

    name: str
    version: str | None  # None: not installed
    enables: str


@dataclass(frozen=True, kw_only=True)
class HealthCheck:
    """One check on this machine."""

    promise: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Health:
    machine: Machine
    versions: dict[str, str]
    devices: tuple[str, ...]
    optional: tuple[Optional, ...]
    checks: tuple[HealthCheck, ...]
    engines: dict[str, str]  # normalizer -> the engine that attention() chooses on this machine

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with whether all checks passed."""
        return {"well": self.well, **asdict(self)}

    @property
    def well(self) -> bool:
        return all(check.passed for check in self.checks)


def examine(progress: Callable[[str, int, int], None] = lambda check, done, total: None) -> Health:
    """Run all checks, which takes a few seconds. progress: called with a check, its index and the number of checks."""
    checks = []
    for index, (promise, attempt) in enumerate(PROMISES.items()):
        progress(promise, index, len(PROMISES))
        checks.append(_run_check(promise, attempt))
    return Health(
        machine=this_machine(),
        versions={
            "attnorm": _version("attnorm") or "not installed",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": _version("transformers") or "not installed",
        },
        devices=_devices(),
        optional=(
            *(Optional(name=name, version=_version(name), enables=use) for name, use in OPTIONAL_PACKAGES.items()),
            Optional(name="C++ compiler", version=_compiler(), enables="torch.compile on the CPU"),
        ),
        checks=tuple(checks),
        engines=engines(),
    )


def engines() -> dict[str, str]:
    """Return the engine of attention() for each normalizer: causal, 64 queries, in bfloat16 if there is a GPU."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    q, k, v = (torch.zeros(1, 1, 64, 64, device=device, dtype=dtype) for _ in range(3))
    inputs = validate_inputs(q, k, v, mask=None, causal=True, scale=None, positions=None)
    by_normalizer: dict[str, str] = {}
    for name in available():
        normalizer = get(name)
        by_normalizer[name] = choose_engine(inputs, normalizer) if isinstance(normalizer, Normalizer) else "its own"
    return by_normalizer


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> tuple[str, ...]:
    cuda = (f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count()))
    return ("cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else []))


def _compiler() -> str | None:
    return next((name for name in ("g++", "c++", "clang++", "cl") if shutil.which(name)), None)


def _run_check(promise: str, attempt: Callable[[], tuple[bool, str]]) -> HealthCheck:
    try:
        passed, detail = attempt()
    except Exception as error:  # any error is a failed check
        passed, detail = False, f"{type(error).__name__}: {error}"
    return HealthCheck(promise=promise, passed=passed, detail=detail)


def _keeps_the_contract(name: str) -> tuple[bool, str]:
    report = check_normalizer(name, raise_on_failure=False)
    failures = "; ".join(f"{check.name}: {check.detail}" for check in report.failures)
    return report.passed, failures or f"{len(report.checks)} checks"


def _matches_sdpa() -> tuple[bool, str]:
    q, k, v = _inputs(64)
    return _compare_outputs(
        attention(q, k, v, "softmax", causal=True), scaled_dot_product_attention(q, k, v, is_causal=True)
    )


def _blocks_match_the_dense_form() -> tuple[bool, str]:
    normalizer = get("entmax15")
    q, k, v = _inputs(2048)
    with torch.no_grad():
        return _compare_outputs(attention(q, k, v, normalizer, causal=True), dense(q, k, v, normalizer, causal=True))


def _hidden_keys_get_nothing() -> tuple[bool, str]:
    logits = torch.tensor([[0.0, torch.nan, 1.0]], requires_grad=True)
    normalizer = get("entmax15")
    weights = normalizer(logits, torch.tensor([[True, False, True]]))
    (gradient,) = torch.autograd.grad((weights * torch.tensor([3.0, 2.0, 1.0])).sum(), logits)
    clean = weights[0, 1].item() == 0 == gradient[0, 1].item() and bool(torch.isfinite(gradient).all())
    return clean, "weight 0, gradient 0" if clean else f"weights {weights.tolist()}, gradient {gradient.tolist()}"


def _analyze_measures() -> tuple[bool, str]:
    from attnorm.analysis.analyze import analyze
    from attnorm.models.load import BUNDLED

    analysis = analyze(BUNDLED, lengths=64, windows=1, rows=8, metrics="core")
    heads = analysis.heads.num_rows
    broken = analysis.verdict.counts["broken"]
    return heads > 0 and not broken, f"{heads} heads, {broken} with numbers that are not finite"


def _patch_can_be_taken_back() -> tuple[bool, str]:
    from attnorm.models.load import BUNDLED, load
    from attnorm.models.patch import patch, unpatch

    model = load(BUNDLED).model
    tokens = torch.arange(32, device=model.device)[None]
    with torch.no_grad():
        before = model(tokens).logits
        patch(model, "entmax15")
        patched = model(tokens).logits
        unpatch(model)
        after = model(tokens).logits
    changed = bool(torch.isfinite(patched).all()) and not torch.equal(patched, before)
    restored = torch.equal(after, before)
    return (
        changed and restored,
        f"logits {'changed' if changed else 'NOT CHANGED'}, then {'restored' if restored else 'NOT RESTORED'}",
    )


def _inputs(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 1, length, 32, generator=generator) for _ in range(3)]


def _compare_outputs(output: Tensor, expected: Tensor) -> tuple[bool, str]:
    error = (output - expected).abs().max().item()
    return error <= CLOSE, f"largest difference {error:.1e}"


PROMISES: dict[str, Callable[[], tuple[bool, str]]] = {
    "softmax passes check_normalizer": lambda: _keeps_the_contract("softmax"),
    "entmax15 passes check_normalizer": lambda: _keeps_the_contract("entmax15"),
    "attention with softmax equals torch SDPA": _matches_sdpa,
    "attention in blocks equals dense attention": _blocks_match_the_dense_form,
    "a NaN logit at a masked key has no effect": _hidden_keys_get_nothing,
    "analyze measures the bundled model": _analyze_measures,
    "patch replaces softmax and unpatch restores it": _patch_can_be_taken_back,
}


def health_tables(health: Health) -> RenderableType:
    machine_table = Table(title="This machine", show_header=False, title_justify="left")
    machine = health.machine
    for name, value in [
        *health.versions.items(),
        ("system", machine.system),
        ("processor", f"{machine.processor}, {machine.cores} cores, torch uses {machine.threads}"),
        ("devices", ", ".join(health.devices)),
    ]:
        machine_table.add_row(name, value)
    caption = "To install a missing package: pip install NAME"
    optional = Table(
        "package", "version", "needed for", title="Optional packages", title_justify="left", caption=caption
    )
    for package in health.optional:
        optional.add_row(package.name, package.version or Text("missing", style="yellow"), package.enables)
    checks = Table("check", "result", "details", title="Self-test", title_justify="left")
    for check in health.checks:
        verdict = Text("passed", style="green") if check.passed else Text("FAILED", style="bold red")
        checks.add_row(check.promise, verdict, check.detail)
    engines = Table(
        "engine", "normalizers", title="Engine that attention() chooses for each normalizer", title_justify="left"
    )
    for engine, label in ENGINES.items():
        if names := [name for name, used in health.engines.items() if used == engine]:
            engines.add_row(label, ", ".join(names))
    return Group(machine_table, optional, engines, checks)
