"""Circuits are found where they were planted, with the weights that a formula gives."""

import math

import numpy as np
import pytest
import torch

from attnorm.analysis.analyze import analyze
from attnorm.analysis.circuits import CODE, circuit_columns, measure_circuits, needles, probe_lengths, repeated_tokens
from attnorm.analysis.own_models import measure
from attnorm.analysis.settings import GROUPS, groups
from attnorm.analysis.verdicts.reach import circuit_of, circuit_sentences, circuit_words, reach
from attnorm.models.load import load
from attnorm.normalizers import get
from tests.analysis.planted import planted


def test_a_repeated_sequence_has_its_key_after_the_earlier_occurrence() -> None:
    probe = repeated_tokens(torch.arange(10, 500), (3,), 128, 3, torch.Generator().manual_seed(0))
    assert probe.input_ids[:, 0].tolist() == [3, 3, 3]
    for ids, induction, previous in zip(
        probe.input_ids, probe.targets["induction"], probe.targets["previous_token"], strict=True
    ):
        assert torch.equal(ids[induction - 1], ids[probe.rows])
        assert torch.equal(previous, probe.rows - 1)
        assert len(set(ids.tolist())) == 64  # BOS and 63 different tokens, each twice
    assert probe.rows[-1] == probe.input_ids.shape[1] - 1


def test_the_key_of_a_needle_is_the_token_that_comes_next() -> None:
    ordinary = torch.arange(100, 500)
    probe = needles(torch.arange(50), torch.tensor([60, 61]), ordinary, (1,), 100, 4, torch.Generator().manual_seed(0))
    assert probe.input_ids.shape == (4, 100)
    for ids, target in zip(probe.input_ids, probe.targets["retrieval"], strict=True):
        assert ids[target[0] - 2 : target[0]].tolist() == [60, 61]
        assert torch.equal(ids[target[:-1]], ids[probe.rows[1:]])  # the code read so far is a row behind
        assert len(target) == CODE
    depths = probe.targets["retrieval"][:, 0].tolist()
    assert depths == sorted(depths)
    assert len(set(depths)) == 4


def test_a_planted_induction_head_has_its_exact_weight() -> None:
    gamma = 4.3
    loaded = load(planted(gamma))
    table = measure_circuits(loaded, {"model": None, "hard": get("hard")}, [64, 128], seed=1)
    rows = {
        (row["normalizer"], row["layer"], row["head"], row["circuit"], row["length"]): row for row in table.to_pylist()
    }
    for length in (64, 128):
        probe = repeated_tokens(torch.arange(80), (), length, 1, torch.Generator().manual_seed(0))
        n = probe.rows.double() + 1
        expected = float((math.exp(gamma) / (math.exp(gamma) + n - 1)).mean())
        own = rows["model", 1, 1, "induction", length]
        assert own["weight"] == pytest.approx(expected, rel=1e-4)
        assert own["gap"] == pytest.approx(gamma, rel=1e-4)
        assert own["heaviest"] == 1
        assert own["n"] == pytest.approx(float(n.mean()))
        assert rows["hard", 1, 1, "induction", length]["weight"] == 1
        assert rows["model", 0, 0, "previous_token", length]["weight"] == pytest.approx(1, abs=1e-6)
        assert rows["model", 0, 1, "induction", length]["weight"] == pytest.approx(float((1 / n).mean()), rel=1e-4)
    numbers = circuit_columns(table)
    named = {key[1:]: circuit_of(found) for key, found in numbers.items() if key[0] == "model"}
    assert named == {(0, 0): "previous_token", (0, 1): None, (1, 0): None, (1, 1): "induction"}
    # Half of the weight is lost at 1 + e^gamma = 74.7 keys, between the two lengths.
    assert numbers["model", 1, 1]["circuit_reach"] == pytest.approx(1 + math.exp(gamma), rel=0.05)
    assert numbers["hard", 1, 1]["circuit_reach"] == pytest.approx(112.5, abs=1)


def test_analyze_names_the_circuit_of_a_head_and_how_far_it_is_sharp() -> None:
    tokens = torch.randint(80, (1, 128), generator=torch.Generator().manual_seed(0))
    analysis = analyze(planted(4.3), tokens, metrics="circuits", read_keys=0)
    heads = {(row["layer"], row["head"]): row for row in analysis.heads.to_pylist()}
    assert heads[1, 1]["evidence"].startswith("An induction head; its key has half of the weight or more up to 7")
    assert (
        "previous-token head; its key has half of the weight or more up to 113 keys, the longest probe"
        in heads[0, 0]["evidence"]
    )
    assert "head, sharp" not in heads[0, 1]["evidence"]
    assert heads[0, 1]["induction"] < 0.05
    (sentence,) = [one for one in analysis.verdict.sentences if one.startswith("Circuits")]
    assert (
        "1 induction head (L1H1; 0 sharp at all lengths), 1 previous-token head (L0H0; 1 sharp at all lengths)"
        in sentence
    )
    plain = analyze(planted(4.3), tokens, read_keys=0, rows=8)
    assert np.isnan(plain.heads["induction"].to_numpy()).all()
    assert not [one for one in plain.verdict.sentences if one.startswith("Circuits")]


def test_reach_is_where_the_weight_crosses_a_half() -> None:
    assert reach([64, 256], [0.75, 0.25]) == pytest.approx(128)
    assert reach([64, 256], [0.4, 0.9]) == 0
    assert reach([64, 256, 512], [0.9, 0.8, 0.6]) == 512
    assert reach([], []) == 0


def test_a_head_that_is_never_sharp_is_called_so() -> None:
    row = {"induction": 0.42, "previous_token": 0.1, "retrieval": 0.2, "circuit_reach": 0.0, "circuit_probed": 900.0}
    assert circuit_words(row) == "an induction head; its key has at most 42 % of the weight"
    assert circuit_words({**row, "induction": 0.29}) == ""
    assert circuit_sentences([{**row, "circuit_probed": math.nan}]) == []


def test_lengths_are_octaves_and_include_the_longest() -> None:
    assert probe_lengths(64) == [64]
    assert probe_lengths(300) == [64, 128, 256, 300]
    with pytest.raises(ValueError, match=r"64.*40"):
        probe_lengths(40)


def test_circuits_are_asked_for_by_name_and_need_a_model() -> None:
    assert groups("all") == GROUPS
    assert groups(["all", "circuits"]) == (*GROUPS, "circuits")
    assert groups("circuits") == ("core", "gradient", "circuits")
    q = torch.randn(1, 2, 8, 4)
    with pytest.raises(ValueError, match=r"circuits"):
        measure(q, q, q, metrics="circuits")
