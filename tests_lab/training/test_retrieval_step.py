"""The training step: one graph without a question to the CPU, and low precision only where it does no harm."""

import pytest
import torch

from attnorm_lab.training.retrieval.data import RetrievalRecipe, find_task, training_batches
from attnorm_lab.training.retrieval.model import Retrievers, normalizer_for, run_key
from attnorm_lab.training.retrieval.train import _loss, _standardized
from tests_lab.training.retrieval_stack import CPU, outcomes, trained


@pytest.mark.parametrize(
    "normalizer", [*(pytest.param(name, marks=pytest.mark.nightly) for name in ("softmax", "entmax15")), "topk"]
)
def test_a_step_is_one_graph(normalizer: str) -> None:
    """fullgraph refuses whatever would make a GPU wait for the CPU, such as reading a number off it."""
    task, recipe = find_task("max"), RetrievalRecipe(steps=1, batch=4, width=8, leak_penalty=1.0, leak_from=0.0)
    models = Retrievers(task, normalizer_for(normalizer, 2), (0, 1), 8)
    batch = next(training_batches(task, (0, 1), recipe, CPU))
    torch.compiler.reset()
    graph = torch.compile(lambda drawn: _loss(models, drawn, recipe), backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(graph(batch)[0], _loss(models, batch, recipe)[0])


@pytest.mark.nightly
def test_bfloat16_is_for_the_products_in_training_alone() -> None:
    small = {"batch": 24, "width": 16, "learning_rate": 1e-2}
    ours, theirs = (trained(dtype=dtype, steps=2, **small).models.state_dict() for dtype in ("bfloat16", "float32"))
    assert all(value.dtype == torch.float32 for value in ours.values())
    assert not torch.equal(ours["to_key.weight_SIO"], theirs["to_key.weight_SIO"])
    (record,) = outcomes(trained(dtype="bfloat16", steps=200, **small).models, (0,), 16)
    assert record["accuracy"] > 0.6  # 1/16 by chance


def test_the_key_of_a_run_names_what_is_switched_on() -> None:
    """An option that a later version adds, switched off, must not hide the runs of this one."""
    assert set(RetrievalRecipe().identity()) == {
        "steps", "batch", "smallest", "largest", "width", "learning_rate", "weight_decay",
    }  # fmt: skip
    assert RetrievalRecipe(squeezed=0.5).identity() == {**RetrievalRecipe().identity(), "squeezed": 0.5}
    recipes = (
        RetrievalRecipe(),
        RetrievalRecipe(squeezed=0.5),
        RetrievalRecipe(dtype="bfloat16"),
        RetrievalRecipe(steps=1),
        RetrievalRecipe(cosine=True),
    )
    assert len({run_key("max", "softmax", recipe, "cpu") for recipe in recipes}) == len(recipes)


def test_standardized_logits_forget_their_scale_and_what_is_not_visible() -> None:
    logits = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    visible = torch.arange(16) < torch.tensor([5, 9, 16])[:, None].expand(2, 3, 1)
    scaled = _standardized(logits, visible, 6.0)
    for copy in range(2):
        for row in range(3):
            kept = scaled[copy, row][visible[copy, row]]
            assert kept.mean().abs() < 1e-5
            assert kept.std(correction=0) == pytest.approx(6.0, rel=1e-5)
    torch.testing.assert_close(_standardized(1e-3 * logits + 7, visible, 6.0), scaled, rtol=0.01, atol=0.01)
    changed = logits.masked_fill(~visible, 1e4)
    torch.testing.assert_close(_standardized(changed, visible, 6.0)[visible], scaled[visible])
    assert not _standardized(torch.ones_like(logits), visible, 6.0).any()
