"""The validation loss is the mean over tokens, whatever windows and batches they come in."""

import numpy as np
import pytest
import torch

from attnorm.evaluation.windows import validation_windows
from attnorm_lab.training.lm import evaluate as evaluation
from attnorm_lab.training.lm.evaluate import output_logits, validation_loss
from attnorm_lab.training.lm.model import build_model
from tests_lab.training.conftest import tiny


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_every_token_weighs_the_same(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "EVALUATION_BATCH", batch)
    model = build_model(tiny(context=8), vocabulary=50, end_of_text=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # so that losses differ from token to token
    tokens = np.random.default_rng(0).integers(0, 50, 8 * 5 + 4, dtype=np.uint16)  # the last window is short
    windows = validation_windows(tokens, context=8)
    losses = []
    for window in windows:
        log_p = model(window[None, :-1]).logits[0].detach().double().log_softmax(-1)
        losses += [-float(log_p[index, token]) for index, token in enumerate(window[1:])]
    assert len(losses) == len(tokens) - 1
    assert validation_loss(model, windows, torch.device("cpu"), torch.float32) == pytest.approx(
        np.mean(losses), rel=1e-5
    )


@pytest.mark.parametrize(("vocabulary", "columns"), [(50, 64), (64, 64)])
def test_logits_do_not_depend_on_the_size_of_their_product(
    vocabulary: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 12, generator=generator, requires_grad=True) for n in (7, vocabulary))
    sizes: list[int] = []
    product = torch.nn.functional.linear
    monkeypatch.setattr(evaluation.F, "linear", lambda x, w: sizes.append(len(w)) or product(x, w))
    results = []
    for step in (1, 64):
        logits = output_logits(hidden, weight, step)
        gradients = torch.autograd.grad(logits.logsumexp(-1).square().sum(), (hidden, weight))
        results.append((logits, *gradients))
    assert sizes == [vocabulary, columns]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_weights_depend_on_the_seed_alone_and_leave_the_generator_as_it_was() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one = build_model(tiny(), vocabulary=50, end_of_text=0)
    assert torch.equal(torch.rand(3), expected)
    other = build_model(tiny(), vocabulary=50, end_of_text=0)
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))
