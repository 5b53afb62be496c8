"""A record without the options of a default that changed is from before: `kneemax` meant share=1."""

import inspect
import pickle
from typing import Any, get_args

import pytest
import torch

from attnorm.normalizers.kneemax import DEFAULT_KNEE, Kneemax
from attnorm.normalizers.registry import BUILT_IN, get
from attnorm.normalizers.spec import (
    PART_OPTIONS,
    key_spec,
    parse_spec,
    read_options,
    read_settings,
    read_spec,
    state_options,
    state_spec,
)


@pytest.mark.parametrize(
    ("spec", "stated", "read"),
    [
        ("kneemax", "kneemax:knee=0.25", "kneemax:share=1"),
        ("kneemax:temperature=2", "kneemax:temperature=2:knee=0.25", "kneemax:temperature=2:share=1"),
        ("tempered:map=kneemax:temperature=2", "tempered:map=kneemax+knee=0.25:temperature=2",
         "tempered:map=kneemax+share=1:temperature=2"),
        ("alibi:map=kneemax", "alibi:map=kneemax+knee=0.25", "alibi:map=kneemax+share=1"),
        ("composed:scale=ssmax:map=kneemax+temperature=2", "composed:scale=ssmax:map=kneemax+temperature=2+knee=0.25",
         "composed:scale=ssmax:map=kneemax+temperature=2+share=1"),
        ("laser:normalizer=kneemax", "laser:normalizer=kneemax+knee=0.25", "laser:normalizer=kneemax+share=1"),
        ("forget:bias=3:normalizer=kneemax", "forget:bias=3:normalizer=kneemax+knee=0.25",
         "forget:bias=3:normalizer=kneemax+share=1"),
        *((same, same, same) for same in (
            "kneemax:knee=0.1", "kneemax: share = 2", "composed:map=kneemax+share=3", "softmax", "topk:k=4", "nearmax",
            "recipe.toml", "composed:scale=ssa", "no such", "tempered:map", "laser:normalizer=softmax",
        )),
    ],
)  # fmt: skip
def test_a_specification_is_completed_by_the_default_of_its_time(spec: str, stated: str, read: str) -> None:
    assert (state_spec(spec), read_spec(spec)) == (stated, read)
    name, options = spec.partition(":")[0], {}
    if "no such" not in spec and not spec.endswith(":map"):
        name, options = parse_spec(spec)
        assert parse_spec(stated) == (name, state_options(name, options))
        assert parse_spec(read) == (name, read_options(name, options))


def test_a_completed_specification_is_what_the_plain_name_makes() -> None:
    logits = torch.randn(4, 50, dtype=torch.float64)
    for name in ("kneemax", "tempered:map=kneemax:temperature=0.5", "composed:map=kneemax"):
        plain, stated, earlier = (
            get(spec_name, **options)(logits)
            for spec_name, options in (parse_spec(spec) for spec in (name, state_spec(name), read_spec(name)))
        )
        assert torch.equal(plain, stated)
        assert (earlier - plain).abs().max() > 0.01
    assert torch.equal(get("kneemax")(logits), get("kneemax", knee=DEFAULT_KNEE)(logits))


def test_an_option_that_is_none_states_nothing() -> None:
    """In earlier versions knee=None was the default, with the knee at 1/n."""
    assert state_options("kneemax", {"knee": None}) == {"knee": DEFAULT_KNEE}
    assert read_options("kneemax", {"knee": None}) == {"knee": None, "share": 1}
    assert (state_spec("kneemax:knee=null"), read_spec("kneemax:knee=null")) == ("kneemax:knee=0.25", "kneemax:share=1")


def test_every_option_that_can_name_kneemax_is_completed() -> None:
    """All options of the registry that take a string are tried, so that a new one cannot be forgotten."""
    found: dict[str, str] = {}
    for name, entry in BUILT_IN.items():
        for option, parameter in inspect.signature(entry.factory()).parameters.items():
            if str not in (parameter.annotation, *get_args(parameter.annotation)):
                continue
            try:
                get(name, **{option: "kneemax"})
            except (TypeError, ValueError):
                continue
            assert name not in found, "spec.py completes one option per normalizer"
            found[name] = option
    assert found == PART_OPTIONS


@pytest.mark.parametrize("name", ["laser", "forget"])
def test_a_mechanism_takes_options_of_its_normalizer(name: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 8, dtype=torch.float64)
    plain, stated, earlier, other = (
        get(name, normalizer=normalizer)(q, k, v, causal=True)
        for normalizer in ("kneemax", "kneemax+knee=0.25", "kneemax+share=1", get("kneemax", share=1))
    )
    assert torch.equal(plain, stated)
    assert torch.equal(earlier, other)
    assert (earlier - plain).abs().max() > 0.001


def test_settings_and_results_keep_their_meaning() -> None:
    line = {
        "normalizer": "kneemax", "seed": 1,
        "settings": {"normalizer": "kneemax", "normalizer_options": {}, "recipe": {"0-3": "kneemax", "4": "softmax"}},
    }  # fmt: skip
    assert read_settings(line) == {
        "normalizer": "kneemax:share=1", "seed": 1,
        "settings": {
            "normalizer": "kneemax", "normalizer_options": {"share": 1},
            "recipe": {"0-3": "kneemax:share=1", "4": "softmax"},
        },
    }  # fmt: skip
    assert line["normalizer"] == "kneemax", "the record itself stays"
    assert read_settings({"steps": 3}) == {"steps": 3}
    tested = read_settings({"tests": {"others": ["kneemax", "re-fitted"], "observed": 1}})
    assert tested == {"tests": {"others": ["kneemax:share=1", "re-fitted"], "observed": 1}}


def test_keys_of_runs_are_those_of_earlier_versions() -> None:
    assert key_spec("kneemax:share=1") == "kneemax"
    for other in ("kneemax:knee=0.25", "kneemax:share=2", "softmax", "topk:k=4"):
        assert key_spec(other) == other


@pytest.mark.parametrize(("saved", "shown"), [({"knee": None}, "share=1.0"), ({"knee": 0.25}, "knee=0.25")])
def test_a_pickled_map_of_an_earlier_version_stays_the_same_map(saved: dict[str, Any], shown: str) -> None:
    """They had share=1.0 in both cases."""
    map_ = Kneemax()
    map_.__dict__.update({"share": 1.0, **saved})
    loaded = pickle.loads(pickle.dumps(map_))
    knees = loaded.knees(torch.tensor([10.0]))
    assert (knees.item(), loaded.extra_repr()) == (pytest.approx(saved["knee"] or 0.1), shown)
