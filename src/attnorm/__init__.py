"""attnorm: measure how sharply attention selects, compare it with theoretical limits, and replace softmax."""

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from attnorm.attention import attention, normalize
from attnorm.normalizers import (
    ContractError,
    LogitRule,
    Map,
    Mechanism,
    Normalizer,
    Positions,
    Properties,
    ScaleRule,
    Selection,
    Sink,
    available,
    check_normalizer,
    compose,
    get,
    mixture,
    register,
)

if TYPE_CHECKING:
    from attnorm.analysis.analyze import analyze as analyze
    from attnorm.analysis.output_bottleneck import OutputBottleneck as OutputBottleneck
    from attnorm.analysis.output_bottleneck import output_bottleneck as output_bottleneck
    from attnorm.analysis.own_models import measure as measure
    from attnorm.analysis.own_models import observe as observe
    from attnorm.analysis.result import Analysis as Analysis
    from attnorm.analysis.verdicts import Thresholds as Thresholds
    from attnorm.evaluation.run import evaluate as evaluate
    from attnorm.metrics.attention_statistics import AttentionStatistics, attention_statistics
    from attnorm.models.patch import patch as patch
    from attnorm.models.patch import swap as swap
    from attnorm.models.patch import unpatch as unpatch
    from attnorm.models.saving import from_pretrained as from_pretrained
    from attnorm.models.saving import save_pretrained as save_pretrained
    from attnorm.monitor.monitor import AttentionMonitor
    from attnorm.monitor.qk_clip import QKClip

try:
    __version__ = version("attnorm")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+source"

__all__ = [
    "Analysis",
    "AttentionMonitor",
    "AttentionStatistics",
    "ContractError",
    "LogitRule",
    "Map",
    "Mechanism",
    "Normalizer",
    "OutputBottleneck",
    "Positions",
    "Properties",
    "QKClip",
    "ScaleRule",
    "Selection",
    "Sink",
    "Thresholds",
    "analyze",
    "attention",
    "attention_statistics",
    "available",
    "check_normalizer",
    "compose",
    "evaluate",
    "from_pretrained",
    "get",
    "measure",
    "mixture",
    "normalize",
    "observe",
    "output_bottleneck",
    "patch",
    "register",
    "save_pretrained",
    "swap",
    "theory",
    "unpatch",
]


# Public name -> its module, imported on first use: `attention` needs neither SciPy, transformers nor pyarrow.
_LAZY = {
    "Analysis": "attnorm.analysis.result",
    "AttentionMonitor": "attnorm.monitor.monitor",
    "AttentionStatistics": "attnorm.metrics.attention_statistics",
    "OutputBottleneck": "attnorm.analysis.output_bottleneck",
    "QKClip": "attnorm.monitor.qk_clip",
    "Thresholds": "attnorm.analysis.verdicts",
    "analyze": "attnorm.analysis.analyze",
    "attention_statistics": "attnorm.metrics.attention_statistics",
    "evaluate": "attnorm.evaluation.run",
    "from_pretrained": "attnorm.models.saving",
    "measure": "attnorm.analysis.own_models",
    "observe": "attnorm.analysis.own_models",
    "output_bottleneck": "attnorm.analysis.output_bottleneck",
    "patch": "attnorm.models.patch",
    "save_pretrained": "attnorm.models.saving",
    "swap": "attnorm.models.patch",
    "unpatch": "attnorm.models.patch",
}


def __getattr__(name: str) -> Any:
    if name == "theory":
        return importlib.import_module("attnorm.theory")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'attnorm' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, loaded or not, without what this file imports for itself."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
