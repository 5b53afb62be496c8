"""Every built-in normalizer, and compositions of them, keep the contract."""

import pickle
from functools import partialmethod

import pytest
import torch
from torch import nn

from attnorm.normalizers import Normalizer, get
from attnorm.normalizers.check import check_normalizer
from attnorm.normalizers.contract_checks import CHECKS
from attnorm.normalizers.registry import BUILT_IN
from tests.normalizers.variants import ALIKE, COMPOSED, DECLARED, ROW_NAMES, VARIANTS, Variant

# Traced in every run of the tests: a scan. tests/attention compiles a rule with a parameter and traces a threshold map.
TRACED = [Variant("stick_breaking", {})]


# Other options and every second composition run at night; test_reference.py has all options in every run.
OFTEN = [*(variants[0] for name, variants in DECLARED.items() if name not in ALIKE), *COMPOSED[1::2]]


@pytest.mark.parametrize(
    "variant",
    [variant if variant in OFTEN else pytest.param(variant, marks=pytest.mark.nightly) for variant in VARIANTS],
    ids=str,
)
@pytest.mark.every_second("variant")
def test_every_built_in_keeps_the_contract(variant: Variant) -> None:
    report = check_normalizer(variant.make(), heads=variant.heads, width=variant.width)
    assert report.passed
    assert [check.name for check in report.checks] == [name for name in CHECKS if name != "compiled"]


@pytest.mark.parametrize("variant", TRACED, ids=str)
def test_some_keep_it_traced(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    """As compiled, without the C++ code that the inductor would write for 15 s."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    assert check_normalizer(variant.make(), compile=True, exceptions=_all_but_compiled()).passed


@pytest.mark.nightly
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_all_keep_it_compiled(variant: Variant) -> None:
    report = check_normalizer(
        variant.make(), heads=variant.heads, width=variant.width, compile=True, exceptions=_all_but_compiled()
    )
    assert report.passed


def _all_but_compiled() -> dict[str, str]:
    return {name: "checked in another test" for name in CHECKS if name not in ("runs", "compiled")}


@pytest.mark.parametrize("variant", [*VARIANTS, Variant("linear", {})], ids=str)
def test_every_built_in_survives_a_pickle(variant: Variant) -> None:
    normalizer = get("linear") if variant.name == "linear" else variant.make()
    loaded = pickle.loads(pickle.dumps(normalizer))
    assert repr(loaded) == repr(normalizer)
    if isinstance(normalizer, Normalizer) and variant.width is None:
        logits = torch.linspace(-3, 3, 5 * variant.heads).reshape(1, variant.heads, 1, 5)
        assert torch.equal(loaded(logits), normalizer(logits))


EXCEPTED = [name for name in ROW_NAMES if BUILT_IN[name].declaration.exceptions]


@pytest.mark.parametrize("name", EXCEPTED)
def test_every_exception_is_needed_and_has_a_reason(name: str) -> None:
    exceptions = BUILT_IN[name].declaration.exceptions
    report = check_normalizer(name, exceptions={}, raise_on_failure=False)
    assert {check.name for check in report.failures} == set(exceptions)
    assert all(len(reason) > 20 for reason in exceptions.values())
