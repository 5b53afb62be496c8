"""The numbers of public functions are those of goldens.parquet, which tests/goldens/make.py wrote."""

import functools
from collections.abc import Callable, Container, Iterator

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.goldens import make
from tests.goldens.make import Numbers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1024 * torch.finfo(torch.float32).eps  # rotary positions and norms of layers are in float32


@functools.cache
def goldens() -> dict[str, Numbers]:
    found: dict[str, Numbers] = {}
    for row in pq.read_table(make.FILE).to_pylist():
        place = row["table"], row["row"], row["column"]
        found.setdefault(row["table"], {})[place] = row["word"] or row["value"]
    return found


def assert_golden(found: Numbers, *tables: str, some: Container[str] | None = None) -> None:
    """Every golden number of these tables is found, NaN where it was NaN. New numbers are no failure."""
    expected = {place: value for table in tables for place, value in goldens()[table].items()}
    if some is not None:
        expected = {place: value for place, value in expected.items() if place[1] in some}
    missing = expected.keys() - found.keys()
    assert not missing, f"{len(missing)} numbers are gone, e.g. {min(missing)}"
    words = {place: value for place, value in expected.items() if isinstance(value, str)}
    assert {place: found[place] for place in words} == words
    places = [place for place in expected if place not in words]
    old, new = (np.array([numbers[place] for place in places], dtype=float) for numbers in (expected, found))
    wrong = ~np.isclose(new, old, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    some = [(places[index], old[index], new[index]) for index in wrong.nonzero()[0][:10]]
    assert not wrong.any(), f"{wrong.sum()} of {len(places)} numbers changed: {some}"


@pytest.mark.parametrize("name", ["causal", "encoder", "compared"])
def test_every_number_of_a_report(name: str) -> None:
    assert_golden(make.report(name), *(table for table in goldens() if table.startswith(f"{name} ")))


@pytest.mark.parametrize("measure", [make.statistics, make.measured])
def test_every_metric_of_every_normalizer(measure: Callable[..., Numbers]) -> None:
    assert_golden(found := measure(), *{table for table, _, _ in found})


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels measure, in Triton's interpreter where there is no GPU: tensors then say that they are on one."""
    pytest.importorskip("triton")
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # as Tensor.get_device() on a CPU
    with torch.device(DEVICE):
        yield


def test_every_metric_on_kernels(on_kernels: None) -> None:
    assert_golden(make.measured(torch.float32), "measured heads")


def test_statistics_on_kernels(on_kernels: None) -> None:
    """With a mask and sinks, for one map of each kernel: the interpreter is slow."""
    found = make.statistics(torch.float32, ["softmax", "sink", "entmax15", "kneemax", "sigmoid with a sink"])
    assert_golden(found, "statistics", some={place[1] for place in found})


def test_every_output_and_gradient() -> None:
    assert_golden({**make.attention(), **make.mechanisms()}, "attention")


@pytest.mark.parametrize("engine", ["triton", "sparse"])
def test_every_output_and_gradient_on_kernels(engine: str) -> None:
    pytest.importorskip("triton")
    names = [name for _, name, column in goldens()["engines"] if column == engine]
    with torch.device(DEVICE):
        found = make.attention(engine, torch.float32, names)
    assert_golden(found, "attention", some={place[1] for place in found})
