"""On real models analyze() gives the numbers of a dense, slow, separate computation in float64.

Weights come from transformers' own eager attention, values from the projections, statistics from plain formulas; the
model is computed in float64 on both sides, so that only the measurement is compared (to 1e-5: eager attention rounds
its weights to float32), and once more in float32.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnorm.analysis.analyze import analyze
from attnorm.analysis.settings import passage
from attnorm.models.load import load
from tests.metrics.reference import separability

LENGTH = 128
TOP_N = (1, 5, 20)


@dataclass(frozen=True)
class Dense:
    weights: list[Tensor]  # per layer (H, K), of the last row
    values: list[Tensor]  # per layer (H, K, D)


def dense(model: nn.Module, ids: Tensor, projection: str, split: Callable[[Tensor], Tensor]) -> Dense:
    """The last row of every head, by transformers' eager attention and a hook on the value projection."""
    found: list[Tensor] = []
    with hooked(model, projection, lambda output: found.append(split(output.detach()))), torch.no_grad():
        attentions = model(ids, output_attentions=True, use_cache=False).attentions
    weights = [layer[0, :, -1] for layer in attentions]
    return Dense(weights, [v.repeat_interleave(len(weights[0]) // len(v), 0) for v in found])


@contextmanager
def hooked(model: nn.Module, projection: str, keep: Callable[[Tensor], None]) -> Iterator[None]:
    modules = [module for name, module in model.named_modules() if name.endswith(projection)]
    handles = [module.register_forward_hook(lambda _m, _i, output: keep(output)) for module in modules]
    yield
    for handle in handles:
        handle.remove()


def plain_numbers(w: Tensor, x: Tensor) -> dict[str, float]:
    """One row, spelled out: weights (K,), vectors (K, D)."""
    n = len(w)
    numbers = {
        "entropy_nats": float(-(w * w.log()).sum()),
        "logit_spread": float(w.max().log() - w.min().log()),
        "sink_mass": float(w[0]),
        "max_weight": float(w.max()),
        "effective_keys": float(1 / (w**2).sum()),
        "jacobian_norm": float(torch.linalg.eigvalsh(torch.diag(w) - torch.outer(w, w))[-1]),
    }
    order = w.argsort(descending=True, stable=True)
    y = w[:, None] * x
    for N in TOP_N:
        inside, outside = order[:N], order[N:]
        A, s = float(w[inside].sum()), y[inside].sum(0)
        distances = (y - s).norm(dim=1)
        numbers[f"mass {N}"] = A
        numbers[f"d_tilde {N}"] = float(distances[outside].sum())
        furthest = float(torch.cdist(x[outside], x[inside]).max())
        largest = float(x[inside].norm(dim=1).max())
        numbers[f"fixed_printed {N}"] = (1 - A) * furthest + largest * (A * (n - N) - (1 - A))
        tight = w[outside] * (x[outside] - s / A).norm(dim=1) + (A - w[outside]).abs() * s.norm() / A
        numbers[f"fixed_tight {N}"] = float(tight.sum())
        x_bar, ratio = y.sum(0), N / (n - 1)
        mu = (1 + ratio) * y - ratio * x_bar
        numbers[f"random_lower {N}"] = float((n - N) / n * mu.norm(dim=1).sum())
        m = n - 1
        mean_of_others = (x_bar - y) / m
        from_mean = torch.cdist(mean_of_others, y).square().fill_diagonal_(0)
        V = N * (m - N) / (m * (m - 1)) * from_mean.sum(1)
        numbers[f"random_upper {N}"] = float((n - N) / n * (mu.norm(dim=1).square() + V).sqrt().sum())
        numbers[f"separability {N}"] = float(separability(w, x, order, N))
    return numbers


def analyzed(model: Any, ids: Tensor) -> list[dict[str, float]]:
    """The same numbers out of analyze(), head after head."""
    analysis = analyze(model, ids[0], lengths=[LENGTH], rows="last", top_n=TOP_N, metrics="all")
    heads = analysis.heads.to_pylist()
    sets = {(row["layer"], row["head"], row["top_n"]): row for row in analysis.top_n.to_pylist()}
    found = []
    for row in heads:
        numbers = dict(row)
        for N in TOP_N:
            for name, value in sets[row["layer"], row["head"], N].items():
                numbers[f"{name} {N}"] = value
        found.append(numbers)
    return found


Numbers = dict[tuple[int, int], dict[str, float]]  # of each layer and head


def numbers_of(rows: Dense) -> Numbers:
    return {
        (layer, head): plain_numbers(w, x)
        for layer, (weights, values) in enumerate(zip(rows.weights, rows.values, strict=True))
        for head, (w, x) in enumerate(zip(weights.double(), values.double(), strict=True))
    }


def compare(exact: Numbers, found: list[dict[str, float]], absolute: float, relative: float, apart: float) -> None:
    """absolute: of entropy, spread and masses; relative: of the rest; apart: share of heads whose Ns/N may differ."""
    different = 0
    for row, ((layer, head), numbers) in zip(found, exact.items(), strict=True):
        assert (row["layer"], row["head"]) == (layer, head)
        for name, expected in numbers.items():
            where = f"layer {layer} head {head} {name}"
            if name.startswith("separability"):
                different += not np.isclose(row[name], expected, atol=1e-3)
            elif name.startswith(("entropy", "logit_spread", "sink_mass", "max_weight", "mass")):
                assert row[name] == pytest.approx(expected, abs=absolute, rel=absolute), where
            else:
                assert row[name] == pytest.approx(expected, rel=relative, abs=absolute / 10), where
    assert different <= apart * len(found) * len(TOP_N)


def bundled(dtype: torch.dtype) -> tuple[Any, Tensor]:
    loaded = load("bundled", dtype=dtype)
    assert loaded.tokenizer is not None
    return loaded.model, loaded.tokenizer(passage(), return_tensors="pt").input_ids[:, :LENGTH]


def gpt2_values(heads: int) -> Callable[[Tensor], Tensor]:
    return lambda output: output[0].chunk(3, -1)[2].unflatten(-1, (heads, -1)).transpose(0, 1)


DTYPES = (torch.float64, 1e-5, 1e-5, 0), (torch.float32, 1e-4, 1e-3, 0.05)
NAMES = ("dtype", "absolute", "relative", "apart")


@pytest.fixture(scope="module")
def of_bundled() -> Numbers:
    model, ids = bundled(torch.float64)
    model.set_attn_implementation("eager")
    return numbers_of(dense(model, ids, "c_attn", gpt2_values(6)))


@pytest.mark.parametrize(NAMES, DTYPES)
def test_the_bundled_model(
    of_bundled: Numbers, dtype: torch.dtype, absolute: float, relative: float, apart: float
) -> None:
    model, ids = bundled(dtype)
    compare(of_bundled, analyzed(model, ids), absolute, relative, apart)


def smollm2_tokens(folder: Path) -> Tensor:
    return AutoTokenizer.from_pretrained(folder)(passage(), return_tensors="pt").input_ids[:, :LENGTH]


@pytest.fixture(scope="module", params=[3, pytest.param(30, marks=pytest.mark.nightly)])
def layers(request: pytest.FixtureRequest) -> int:
    """How many of its 30 layers run."""
    found: int = request.param
    return found


@pytest.fixture(scope="module")
def of_smollm2(smollm2: Path, layers: int) -> Numbers:
    model = AutoModelForCausalLM.from_pretrained(
        smollm2, dtype=torch.float64, attn_implementation="eager", num_hidden_layers=layers
    )
    split = lambda output: output[0].unflatten(-1, (-1, 64)).transpose(0, 1)  # noqa: E731
    return numbers_of(dense(model, smollm2_tokens(smollm2), "v_proj", split))


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.nightly  # the bundled model is measured on every commit
@pytest.mark.parametrize(NAMES, DTYPES)
def test_smollm2(
    of_smollm2: Numbers, smollm2: Path, layers: int, dtype: torch.dtype, absolute: float, relative: float, apart: float
) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype, num_hidden_layers=layers)
    compare(of_smollm2, analyzed(model, smollm2_tokens(smollm2)), absolute, relative, apart)
