"""Every built-in normalizer, and compositions of them, keep the contract."""

import pytest

from attnorm.normalizers.check import EXCEPTIONS, check_normalizer
from attnorm.normalizers.checks import CHECKS
from tests.normalizers.variants import ROW_NAMES, VARIANTS, Variant

# Compiled in every run of the tests: a fixed number of Newton steps, a rule with a parameter, a scan.
COMPILED = [Variant("entmax15", {}), Variant("ssmax", {}), Variant("stick_breaking", {})]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_built_in_keeps_the_contract(variant: Variant) -> None:
    report = check_normalizer(variant.make(), width=variant.width)
    assert report.passed
    assert [check.name for check in report.checks] == [name for name in CHECKS if name != "compiled"]


@pytest.mark.parametrize("variant", COMPILED, ids=str)
def test_some_keep_it_compiled(variant: Variant) -> None:
    assert check_normalizer(variant.make(), compile=True, exceptions=_all_but_compiled()).passed


@pytest.mark.nightly
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_all_keep_it_compiled(variant: Variant) -> None:
    report = check_normalizer(variant.make(), width=variant.width, compile=True, exceptions=_all_but_compiled())
    assert report.passed


def _all_but_compiled() -> dict[str, str]:
    return {name: "checked in another test" for name in CHECKS if name not in ("runs", "compiled")}


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_every_exception_is_needed(name: str) -> None:
    report = check_normalizer(name, exceptions={}, raise_on_failure=False)
    assert {check.name for check in report.failures} == set(EXCEPTIONS[name])


def test_exceptions_name_built_ins_and_checks_and_give_a_reason() -> None:
    for name, reasons in EXCEPTIONS.items():
        assert name in ROW_NAMES
        assert set(reasons) <= set(CHECKS)
        assert all(len(reason) > 20 for reason in reasons.values())


def test_the_table_of_variants_covers_every_row_normalizer() -> None:
    assert {variant.name for variant in VARIANTS} >= set(ROW_NAMES)
    assert len(ROW_NAMES) > 20
