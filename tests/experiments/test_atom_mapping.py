"""Reactions with known atoms; the verdicts about RXNMapper's heads; the model itself where it is in the cache."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from attnorm.experiments.atom_mapping import (
    METRICS,
    Reaction,
    head_scores,
    judge_claims,
    place,
    reaction,
    reactions,
    summary,
)
from attnorm.models.rxnmapper import FILES, MAPPING_HEAD, is_atom, load_mapper, tokens_of


def test_a_smiles_is_split_into_atoms_bonds_and_rings() -> None:
    assert tokens_of("CC(Br)[nH]%12Cl>>O")[1:-1] == ["C", "C", "(", "Br", ")", "[nH]", "%12", "Cl", ">>", "O"]
    assert [token for token in tokens_of("c1=N.(Cl)[O-]#") if is_atom(token)] == ["c", "N", "Cl", "[O-]"]


def test_every_product_atom_has_its_own_reactant_atom_of_the_same_element() -> None:
    for one in reactions(144, seed=0):
        assert [one.tokens[row] for row in one.rows] == [one.tokens[target] for target in one.targets]
        assert len(set(one.targets)) == len(one.targets)
        assert set(one.targets) < set(one.reactant_atoms)  # what leaves has no product atom


def test_the_leaving_group_and_the_dot_are_skipped() -> None:
    one: Reaction = reaction(("{}C(=O)", "O", "N{}"), "CC", "C")
    assert "".join(one.tokens[1:-1]) == "CCC(=O)O.NC>>CCC(=O)NC"
    assert [one.tokens[target] for target in one.targets] == ["C", "C", "C", "O", "N", "C"]
    assert one.targets[-2] == one.tokens.index("N")


def table(right: np.ndarray, verdicts: list[str]) -> pa.Table:
    layers, heads = np.divmod(np.arange(96), 8)
    numbers = {name: np.linspace(0, 1, 96) for name in METRICS}
    return pa.table({"layer": layers, "head": heads, "right": right, "weight": right, "verdict": verdicts, **numbers})


def test_verdicts_that_single_out_the_mapping_heads_are_recognised() -> None:
    own = MAPPING_HEAD[0] * 8 + MAPPING_HEAD[1]
    right = np.zeros(96)
    right[own] = 0.95
    alone = table(right, ["sharp" if index == own else "dispersed" for index in range(96)])
    assert [one.verdict for one in judge_claims(alone)][:2] == ["reproduces", "reproduces"]
    assert [one.verdict for one in judge_claims(table(right, ["healthy"] * 96))][:2] == ["reproduces", "does not"]
    weak = judge_claims(table(right / 2, ["healthy"] * 96))
    assert [one.verdict for one in weak][:2] == ["does not", "not tested"]
    assert place(alone, "right") == 1
    assert place(alone, "max_weight") == 96 - own
    assert "L10H5" in summary(alone)


def test_the_authors_head_maps_atoms() -> None:
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "attnorm" / "rxnmapper"
    if not all((folder / name).is_file() for name in FILES):
        pytest.skip("RXNMapper's model is not in the cache; `attnorm reproduce atom-mapping --quick` fetches it")
    right, weight = head_scores(load_mapper(folder), folder, reactions(4, seed=1))
    assert right.shape == weight.shape == (12, 8)
    assert right[MAPPING_HEAD] > 0.8
    assert np.median(right) < 0.5
