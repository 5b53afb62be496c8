"""What the models see: right answers, data that depends on the seed alone, order kept where priorities are squeezed."""

from itertools import islice

import pytest
import torch

from attnorm_lab.training.retrieval.data import (
    CLASSES,
    STEPS_AT_ONCE,
    TASKS,
    Batch,
    RetrievalRecipe,
    find_task,
    sets_for_testing,
    stream,
    training_batches,
)
from tests_lab.training.retrieval_stack import CPU


def batches(seeds: list[int], steps: int, task: str = "max", **changed: float) -> list[Batch]:
    recipe = RetrievalRecipe(steps=steps, batch=8, **changed)  # type: ignore[arg-type]
    return list(training_batches(find_task(task), seeds, recipe, CPU))


def test_the_label_is_the_class_of_the_visible_item_of_highest_priority() -> None:
    for batch in batches([0, 1], 3):
        for model, number in ((m, n) for m in range(2) for n in range(8)):
            seen = batch.items_SBNF[model, number][batch.visible_SBN[model, number]]
            assert 5 <= len(seen) <= 16
            best = max(seen.tolist(), key=lambda item: item[0])
            assert best[1 + int(batch.label_SB[model, number])] == 1


def test_recall_asks_for_the_nearest_key_and_its_class() -> None:
    sets = next(sets_for_testing(find_task("recall"), [3], 16, 64, CPU))
    keys, classes = sets.items[0, ..., :-CLASSES], sets.items[0, ..., -CLASSES:].argmax(-1)
    nearest = (keys @ sets.query[0, :, :, None]).squeeze(-1).argmax(-1)
    assert sets.target is not None
    assert (nearest == sets.target[0]).float().mean() > 0.95  # noise of length 0.25 against keys at random
    assert torch.equal(classes.gather(-1, sets.target[0][:, None])[:, 0], sets.label[0])
    assert set(sets.target[0].tolist()) >= {0, 15}


def test_recall_never_asks_for_a_hidden_item() -> None:
    sizes = torch.tensor([2, 3, 16] * 100)
    sets = find_task("recall").draw(stream("a test", 0, 0, CPU), sizes, 16)
    assert sets.target is not None
    assert (sets.target < sizes).all()


def test_majority_counts_visible_items_only() -> None:
    for batch in batches([5], 3, "majority"):
        for number in range(8):
            seen = batch.items_SBNF[0, number][batch.visible_SBN[0, number]]
            counts = seen[:, -CLASSES:].sum(0)
            assert counts[batch.label_SB[0, number]] == counts.max()


@pytest.mark.parametrize("task", TASKS)
def test_the_data_of_a_seed_do_not_depend_on_its_neighbors(task: str) -> None:
    options = {"leak_penalty": 1.0, "leak_from": 0.0, "squeezed": 0.5 if find_task(task).has_priority else 0.0}
    together = batches([4, 0, 9], STEPS_AT_ONCE + 2, task, **options)
    for copy, seed in enumerate((4, 0, 9)):
        for ours, alone in zip(together, batches([seed], STEPS_AT_ONCE + 2, task, **options), strict=True):
            for stack, single in zip(ours, alone, strict=True):
                assert torch.equal(stack[copy], single[0])
    several, single_sets = (next(sets_for_testing(find_task(task), seeds, 40, 30, CPU)) for seeds in ([4, 0], [0]))
    assert torch.equal(several.items[1], single_sets.items[0])
    assert torch.equal(several.label[1], single_sets.label[0])


def test_seeds_steps_blocks_and_tests_all_differ() -> None:
    drawn = [batch.items_SBNF[copy, 0, 0, 0].item() for batch in batches([0, 1], 2 * STEPS_AT_ONCE) for copy in (0, 1)]
    drawn += [sets.items[0, 0, 0, 0].item() for sets in sets_for_testing(find_task("max"), [0], 2**16, 5, CPU)]
    assert len(set(drawn)) == len(drawn) > 4 * STEPS_AT_ONCE


def test_a_longer_training_and_another_recipe_begin_with_the_same_data() -> None:
    short, long = batches([0], 3), batches([0], STEPS_AT_ONCE + 3, leak_penalty=1.0)
    second_blocks = [
        islice(batches([0], STEPS_AT_ONCE + 1, **more), STEPS_AT_ONCE, None) for more in ({}, {"leak_penalty": 1.0})
    ]
    assert all(torch.equal(a.items_SBNF, b.items_SBNF) for a, b in zip(short, long, strict=False))
    assert all(torch.equal(a.items_SBNF, b.items_SBNF) for a, b in zip(*second_blocks, strict=True))


def test_fewer_test_sets_are_the_first_of_more() -> None:
    few, many = (list(sets_for_testing(find_task("max"), [1], 16, count, CPU)) for count in (300, 600))
    ours, all_of_them = (torch.cat([sets.items for sets in each], 1) for each in (few, many))
    assert (ours.shape[1], all_of_them.shape[1]) == (300, 600)
    assert torch.equal(ours, all_of_them[:, :300])


def test_squeezing_keeps_the_order_and_narrows_the_gaps() -> None:
    (plain, *_), (squeezed, *_) = batches([0], 1), batches([0], 1, squeezed=1.0)
    before, after = plain.items_SBNF[..., 0], squeezed.items_SBNF[..., 0]
    assert torch.equal(before.argsort(-1), after.argsort(-1))
    assert torch.equal(plain.items_SBNF[..., 1:], squeezed.items_SBNF[..., 1:])
    assert (after.amin(-1) > before.amin(-1)).all()
    assert (after <= 1).all()
    share = torch.cat([(a.items_SBNF != b.items_SBNF).any(-1).any(-1).flatten()
                       for a, b in zip(batches([0], 64), batches([0], 64, squeezed=0.25), strict=True)])  # fmt: skip
    assert 0.15 < share.float().mean() < 0.35


def test_other_classes_cover_all_of_them() -> None:
    first, *_, last = batches([0], 8, leak_penalty=1.0, leak_from=0.5)
    assert first.other_SBN is None
    assert last.other_SBN is not None
    assert set(last.other_SBN.flatten().tolist()) == set(range(CLASSES))
