"""Who takes part, and that all do under the same conditions."""

from pathlib import Path

import pytest

from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import BUILT_IN, get
from attnorm_lab.experiments.retrieval.plan import (
    ADDED_SINCE,
    BASELINE,
    BEST,
    FOR_SETS,
    OUR_RECIPE,
    PAPERS_RECIPE,
    PARTS,
    collect,
    our_recipe,
    plan,
)
from attnorm_lab.training.retrieval.data import RetrievalRecipe
from attnorm_lab.training.retrieval.model import run_key


def test_every_normalizer_for_which_a_set_has_no_order_takes_part() -> None:
    trained = {one.label for one in plan().of("paper")}
    for name in BUILT_IN:
        made = get(name)
        fits = isinstance(made, Normalizer) and made.properties.permutation_equivariant
        left_out = name in (*ADDED_SINCE, "adaptive_temperature")
        assert (FOR_SETS.get(name, name) in trained) == (fits and not left_out), name
    assert "ssa" in {one.label for one in plan(only=["ssa"]).of("paper")}
    assert {"softmax", "ssmax", "kneemax:share=1", "hard"} <= trained
    assert not {"stick_breaking", "local", "scale_invariant"} & trained


@pytest.mark.parametrize("quick", [False, True])
def test_conditions_are_equal_within_a_comparison(quick: bool) -> None:
    made = plan(quick=quick)
    for section in ("paper", "ours", "recall", "majority"):
        members = made.of(section)
        assert members[0].label == BASELINE
        assert len({(one.recipe, one.task, one.trials.sizes, one.trials.sets) for one in members}) == 1
    assert made.of("paper")[0].recipe == made.of("parts")[0].recipe
    assert all(one.recipe.largest == 16 for one in made.trainings)
    if not quick:
        assert len(made.seeds) >= 10
        assert made.of("paper")[0].recipe == RetrievalRecipe(steps=20_000)


def test_the_parts_are_added_and_taken_away_one_by_one() -> None:
    recipes = {one.label: one.recipe for one in plan().of("parts")}
    paper, whole = recipes[PAPERS_RECIPE], recipes[OUR_RECIPE]
    assert whole == our_recipe(paper)
    for part, fields in PARTS.items():
        for name, value in fields.items():
            assert getattr(paper, name) != value
            assert getattr(whole, name) == value
            assert getattr(recipes[f"+ {part}"], name) == value
            assert getattr(recipes[f"ours without {part}"], name) == getattr(paper, name)
    keys = [run_key("max", BASELINE, recipe, "cpu") for recipe in recipes.values()]
    assert len(set(keys)) == len(keys)
    (best,) = (one.recipe for one in plan().of("steps") if one.label == "best")
    assert all(getattr(best, name) == value for name, value in BEST.items())
    assert best.steps == 100_000


def test_only_some_normalizers_and_softmax_to_compare_with() -> None:
    assert [one.label for one in plan(only=["ssmax"]).of("ours")] == ["softmax", "ssmax"]
    assert [one.label for one in plan(only=["topk"], quick=True).of("ours")] == ["softmax", "topk:k=4"]
    fixed_knee = plan(only=["kneemax:knee=0.25"])
    assert [one.label for one in fixed_knee.of("ours", "majority")] == ["softmax", "kneemax:knee=0.25"] * 2
    assert plan(seed=5).seeds[0] == 5
    with pytest.raises(ValueError, match=r"softmax.*'local'"):
        plan(only=["local"])


def test_the_published_records_are_those_of_the_plan(tmp_path: Path) -> None:
    published = Path(__file__).parents[2] / "docs" / "results" / "retrieval.jsonl.xz"
    found = collect(plan(), tmp_path, [published], None, lambda what, done, of: None)
    assert all(one.complete for one in found)
    assert not list(tmp_path.iterdir()), "nothing was left to train"
