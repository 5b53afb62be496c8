"""Normalizers by name: lazy, open to others by decorator or entry point, and helpful when a name is wrong."""

import inspect
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attnorm
from attnorm.attention import Engine
from attnorm.normalizers import (
    Block,
    LogitRule,
    Map,
    Normalizer,
    Properties,
    Selection,
    available,
    get,
    register,
    registry,
)
from attnorm.normalizers.registry import resolve, resolve_for_call
from attnorm.normalizers.softmax import Softmax
from attnorm.normalizers.topk import TopK
from tests.normalizers.variants import ROW_NAMES

MECHANISMS = [
    "gaussian", "soft", "linear", "selective", "differential", "differential_v2", "tda", "laser", "forget",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _own_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


class Flat(Map):
    """The same weight for every key."""

    properties = Properties(row_sum="one")

    def forward(self, block: Block) -> Tensor:
        return block.hide(torch.ones_like(block.logits) / block.n.clamp(min=1))


def test_the_binding_names_are_all_there() -> None:
    names = """softmax sparsemax entmax15 entmax ssmax asentmax sa_softmax adaptive_temperature sigmoid softmax1 sink
    relu softpick stick_breaking topk hard log_scaled scale_invariant kernel gaussian soft linear selective differential
    local"""
    assert set(available()) >= set(names.split())
    assert set(ROW_NAMES) | set(MECHANISMS) == set(registry.BUILT_IN)


def test_type_checkers_know_every_built_in_by_its_kind() -> None:
    assert set(get_args(registry.RowName)) <= set(ROW_NAMES)
    assert set(get_args(registry.MechanismName)) == set(MECHANISMS)


@pytest.mark.parametrize("name", ROW_NAMES)
def test_every_built_in_has_its_name_a_summary_and_a_paper(name: str) -> None:
    entry = registry.BUILT_IN[name]
    assert get(name).name == name
    assert len(entry.summary) > 20
    assert entry.paper
    assert entry.url.startswith("https://") or (Path(__file__).parents[2] / entry.url).is_file()


def test_a_map_rule_selection_or_factory_can_be_registered() -> None:
    @register("doubled")
    class Doubled(LogitRule):
        def forward(self, block: Block) -> Tensor:
            return 2 * block.logits

    @register("first_two")
    class FirstTwo(Selection):
        def forward(self, block: Block) -> Tensor:
            return torch.arange(block.logits.shape[-1]) < 2

    @register("best")
    def best(k: int = 1) -> Normalizer:
        """The k best."""
        return Normalizer(Flat(), select=[TopK(k)])

    assert register("flat", paper="Us 2026", url="https://example.org")(Flat) is Flat
    z = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    assert get("flat")(z).tolist() == [[0.25] * 4]
    torch.testing.assert_close(get("doubled")(z), torch.softmax(2 * z, -1))
    assert (get("first_two")(z) > 0).tolist() == [[True, True, False, False]]
    assert get("best", k=2)(z).tolist() == [[0.0, 0.5, 0.5, 0.0]]
    assert [get(name).name for name in ("flat", "best")] == ["flat", "best"]
    assert {"flat", "doubled", "first_two", "best"} <= set(available())
    assert registry.entries()["best"].summary == "The k best."
    assert registry.entries()["flat"].paper == "Us 2026"


def test_a_definition_that_is_run_again_takes_the_place_of_the_old() -> None:
    """As a cell of a notebook is, or a module that is reloaded."""
    cell = "@register('halved')\nclass Halved(LogitRule):\n    def forward(self, block): return block.logits / {}"
    logits = torch.tensor([[0.0, 2.0]])
    for divisor in (2, 4):
        exec(cell.format(divisor), {"register": register, "LogitRule": LogitRule, "__name__": "__main__"})
        assert torch.equal(get("halved")(logits), torch.softmax(logits / divisor, -1))


def test_a_name_is_taken_once() -> None:
    register("flat")(Flat)
    register("flat")(Flat)
    with pytest.raises(ValueError, match=r"'flat'.*Flat"):
        register("flat")(lambda: Flat())
    with pytest.raises(ValueError, match=r"'softmax'.*'my_softmax'"):
        register("softmax")(Flat)
    with pytest.raises(ValueError, match="'soft max'"):
        register("soft max")(Flat)


def test_only_close_names_are_suggested() -> None:
    with pytest.raises(ValueError, match="cosine") as wrong:
        get("cosine")
    assert "'sink'" not in str(wrong.value)


@pytest.mark.parametrize("name", ["flash", "sdpa", "fused", "triton", "cudnn", "eager"])
def test_the_name_of_an_engine_is_answered_with_how_to_pass_it(name: str) -> None:
    with pytest.raises(ValueError, match=name) as wrong:
        get(name)
    (passed,) = re.findall(r"engine='(\w+)'", str(wrong.value))
    q = torch.randn(1, 2, 3, 4)
    if passed in ("fused", "blocked"):  # the others need a GPU
        assert attnorm.attention(q, q, q, "softmax", engine=passed).shape == q.shape
    assert passed in get_args(Engine)
    assert "'laser'" not in str(wrong.value)


def test_at_most_three_names_are_suggested() -> None:
    for name in ("flat_one", "flat_two", "flat_six", "flat_ten"):
        register(name)(Flat)
    with pytest.raises(ValueError, match="did you mean") as wrong:
        get("flat_on")
    assert str(wrong.value).count("'flat_") == 1 + 3  # the name that was given, and three


def test_what_others_registered_is_suggested_too() -> None:
    register("flat_attention")(Flat)
    with pytest.raises(ValueError, match="'flat_attention'"):
        get("flat_atention")


def test_options_may_be_written_behind_the_name() -> None:
    logits = torch.randn(2, 5)
    expected = attnorm.normalize(logits, attnorm.get("entmax", alpha=1.3))
    assert torch.equal(attnorm.normalize(logits, "entmax:alpha=1.3"), expected)
    assert attnorm.get("ssmax:s=0.5", heads=3).rules[0].s.tolist() == [0.5] * 3
    with pytest.raises(ValueError, match=r"'entmax:alpha=1.3' and as alpha="):
        attnorm.get("entmax:alpha=1.3", alpha=1.5)
    with pytest.raises(ValueError, match=r"'entmx'.*'entmax'"):
        attnorm.get("entmx:alpha=1.3")
    with pytest.raises(ValueError, match=r"'ssmax:heads=3'.*attnorm\.get\('ssmax', heads=3\)"):
        attnorm.get("ssmax:heads=3")


def test_a_factory_that_makes_something_else_is_named() -> None:
    register("broken")(lambda: 3)
    with pytest.raises(TypeError, match=r"Normalizer.*int"):
        get("broken")


def test_what_a_registered_factory_takes_is_its_own_affair() -> None:
    def takes_anything(own: Flat, text: "str" = "x", free=None):  # type: ignore[no-untyped-def]
        return Flat()

    register("takes_anything")(takes_anything)
    assert get("takes_anything", own=3, text=4, free="x").name == "takes_anything"


def test_a_registered_factory_says_what_its_numbers_are() -> None:
    def with_number(width: int = 3) -> Flat:
        return Flat()

    register("with_number")(with_number)
    with pytest.raises(TypeError, match=r"'with_number'.*width.*2\.5.*3"):
        get("with_number", width=2.5)


def test_a_registered_factory_gets_a_tensor_unless_it_takes_a_number() -> None:
    taken: list[Any] = []

    def with_tensor(start: Tensor, free=None, number: float = 0.0) -> Flat:  # type: ignore[no-untyped-def]
        taken[:] = [start, free, number]
        return Flat()

    register("with_tensor")(with_tensor)
    one = torch.tensor([0.5])
    get("with_tensor", start=one, free=one, number=one)
    assert taken[0] is taken[1] is one
    assert (taken[2], type(taken[2])) == (0.5, float)


# Entry points: a distribution that really lies on the path.


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str, str], None]]:
    """Puts a package with one module and these entry points on the path."""

    def add(package: str, source: str, points: str) -> None:
        folder = tmp_path / package
        (folder / f"{package}-1.0.dist-info").mkdir(parents=True)
        (folder / f"{package}.py").write_text(source)
        (folder / f"{package}-1.0.dist-info" / "METADATA").write_text(f"Name: {package}\nVersion: 1.0\n")
        (folder / f"{package}-1.0.dist-info" / "entry_points.txt").write_text(f"[attnorm.normalizers]\n{points}\n")
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, package, raising=False)

    yield add
    for name in ("flatpack", "otherpack"):
        sys.modules.pop(name, None)


SOURCE = """
import torch
from attnorm.normalizers import Map, Properties, register

class Flat(Map):
    properties = Properties(row_sum="one")

    def forward(self, block):
        return block.hide(torch.ones_like(block.logits) / block.n.clamp(min=1))
"""


def test_an_installed_package_is_found_without_an_import(install: Callable[[str, str, str], None]) -> None:
    assert "flat" not in available()
    install("flatpack", SOURCE, "flat = flatpack:Flat")
    assert "flat" in available()
    assert "flatpack" not in sys.modules
    assert get("flat")(torch.zeros(1, 4)).tolist() == [[0.25] * 4]
    with pytest.raises(ValueError, match="'flat'"):
        get("flatt")


def test_a_package_may_use_both_ways_for_the_same_thing(install: Callable[[str, str, str], None]) -> None:
    install("flatpack", SOURCE + '\nregister("flat", paper="Us 2026")(Flat)\n', "flat = flatpack:Flat")
    assert get("flat").name == "flat"
    assert registry.entries()["flat"].paper == "Us 2026"
    assert get("flat").name == "flat"


@pytest.mark.parametrize("name", ["flat", "softmax"])
def test_two_packages_with_one_name_collide(install: Callable[[str, str, str], None], name: str) -> None:
    install("flatpack", SOURCE, f"{name} = flatpack:Flat")
    install("otherpack", SOURCE, f"{name} = otherpack:Flat")
    with pytest.raises(ValueError, match=f"entry point '{name}'"):
        available()


def test_the_search_for_entry_points_is_not_repeated_on_every_call() -> None:
    get("softmax")
    start = time.perf_counter()
    for _ in range(20):
        registry.entries()
    assert (time.perf_counter() - start) / 20 < 1e-3


def defaults(function: Any) -> dict[str, Any]:
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_an_option_has_the_same_default_in_the_factory_the_reference_and_the_classes(name: str) -> None:
    factory, reference = registry.BUILT_IN[name].factory(), registry.BUILT_IN[name].declaration.reference
    own = defaults(factory)
    others = [entry.factory() for other, entry in registry.BUILT_IN.items() if other != name]  # of the same file
    classes = [
        one.__init__
        for one in vars(sys.modules[factory.__module__]).values()
        if inspect.isclass(one) and one.__module__ == factory.__module__ and "__init__" in vars(one)
        if one not in others
    ]
    for other in [*classes, *([] if reference is None else [reference])]:
        shared = {option: value for option, value in defaults(other).items() if option in own}
        assert shared == {option: own[option] for option in shared}, other


# Numbers that a user gets without asking: a change is a change of what a name means.
NUMBERS = {
    "softmax": {"temperature": 1.0}, "entmax": {"alpha": 1.5}, "ssmax": {"train_length": 1024, "size": 1.0},
    "asentmax": {"alpha": 1.5, "delta": 1.0, "beta": 0.55, "gamma": 0.0}, "sink": {"logit": 0.0},
    "relu": {"power": 1.0}, "softpick": {"eps": 1e-8}, "topk": {"k": 64},
    "log_scaled": {"train_length": 1024, "attention_scale": 0.1, "floor_scale": 8192, "extension": 4.0},
    "scale_invariant": {"tau": 10.0}, "kernel": {"power": 2, "offset": 0.0},
    "kneemax": {"share": None, "knee": None, "temperature": 1.0}, "local": {"window": 256}, "softcap": {"cap": 50.0},
    "ssa": {"beta": 2.0}, "norm_softmax": {"temperature": 1.0}, "threshold_relu": {"beta": 1.0, "power": 2.0},
    "odd_polynomial": {"power": 3}, "tempered": {"temperature": 1.0},
}  # fmt: skip


def test_numbers_that_are_the_default() -> None:
    for name, expected in NUMBERS.items():
        found = {
            option: value for option, value in defaults(registry.BUILT_IN[name].factory()).items() if option in expected
        }
        assert found == expected, name
    assert str(get("kneemax").map) == "Kneemax(knee=0.25)"


def test_a_name_is_given_only_to_what_has_none() -> None:
    own = Normalizer(Softmax(), name="mine")
    assert registry.as_normalizer(own, "other").name == "mine"
    assert registry.as_normalizer(Softmax(), "other").name == "other"
    assert registry.as_normalizer(Softmax()).name == "custom"


def test_a_call_makes_a_normalizer_without_parameters_once() -> None:
    here = torch.empty(0)
    assert resolve_for_call("softmax", here) is resolve_for_call("softmax", here)
    assert resolve_for_call("sink", here) is not resolve_for_call("sink", here)
    assert resolve("softmax") is not resolve_for_call("softmax", here)
    own = get("softmax")
    assert resolve_for_call(own, here) is own
    with pytest.raises(ValueError, match="sofmax"):
        resolve_for_call("sofmax", here)


def test_a_normalizer_given_by_name_is_built_on_the_device_of_the_tensor() -> None:
    assert attnorm.normalize(torch.empty(3, 4, device="meta"), "sink").device.type == "meta"
    with FakeTensorMode():
        assert attnorm.normalize(torch.empty(3, 4), "sink").shape == (3, 4)


class Centered(attnorm.LogitRule):
    def __init__(self, center: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("center", center)

    def forward(self, block: Block) -> torch.Tensor:
        return block.logits - self.center


def test_a_factory_that_ignores_the_device_of_the_call_is_named() -> None:
    own = get("sink")
    register("kept_by_its_factory")(lambda: own)
    register("made_on_the_cpu")(lambda: Centered(torch.zeros(3, device="cpu")))
    for resolve_call in (resolve_for_call, torch.compile(resolve_for_call, backend="eager")):
        for name in ("kept_by_its_factory", "made_on_the_cpu"):
            with pytest.raises(Exception, match=rf"'{name}' on meta.*got cpu"):
                resolve_call(name, torch.empty(3, device="meta"))
        assert resolve_call("kept_by_its_factory", torch.empty(3)) is own
    assert {parameter.device.type for parameter in own.parameters()} == {"cpu"}
