"""Any shape and strides; rows are independent."""

import torch

from attnorm.normalizers.block import Positions
from attnorm.normalizers.checks.subject import CheckedNormalizer, Complaints, exceeds, largest, some_mask

ROUNDING = 1e-10


def runs(subject: CheckedNormalizer) -> Complaints:
    """Weights have the logits' shape and dtype, whatever that of the parameters, and the inputs stay as they were."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        logits = subject.logits().to(dtype)
        kept = logits.clone()
        for mask in (None, some_mask(logits)):
            weights = subject(logits, mask)
            if weights.shape != logits.shape or weights.dtype != dtype:
                yield f"logits {tuple(logits.shape)} {dtype} give weights {tuple(weights.shape)} {weights.dtype}"
        if not torch.equal(logits, kept):
            yield f"the {dtype} logits passed in were written to"


def single_key(subject: CheckedNormalizer) -> Complaints:
    """One key, or one visible key among others, is a row like any other: finite, and 1 if rows sum to 1."""
    alone, among, long = subject.logits(1, 1), subject.logits(5, 5), subject.logits(7, 263)
    own = torch.arange(263) == torch.arange(256, 263)[:, None]
    others_see_all = own | (torch.arange(7) % 3 > 0)[:, None]
    cases = ((alone, None), (alone, torch.ones(1, 1)), (among, torch.eye(5)), (long, own), (long, others_see_all))
    for logits, mask in cases:
        weights, gradient, _ = subject.gradients(logits, None if mask is None else mask.bool())
        sums = weights.sum(-1)
        if not (weights.isfinite().all() and gradient.isfinite().all()):
            yield f"one visible key of {logits.shape[-1]} gives a weight or gradient that is not finite"
        elif subject.normalizer.properties.row_sum == "one" and exceeds(largest(sums - 1), ROUNDING):
            yield f"one visible key of {logits.shape[-1]} should get weight 1, got {sums.flatten()[0].item()!r}"


def rows_alone(subject: CheckedNormalizer) -> Complaints:
    """A row gives the same weights alone as among others, at prime sizes too: what decoding with a cache relies on."""
    for queries, keys in ((3, 5), (7, 13), (2, 131), (1, 257)):
        logits = subject.logits(queries, keys, batch=3)
        mask, hidden = some_mask(logits), subject.hidden_states(3, queries)
        positions = torch.arange(keys - queries, keys), torch.arange(keys)
        together = subject(logits, mask, positions=Positions(*positions))
        for i in range(queries):
            here = Positions(positions[0][i : i + 1], positions[1])
            row, seen = logits[:, :, i : i + 1], mask[:, :, i : i + 1]
            own = None if hidden is None else hidden[:, i : i + 1]
            alone = subject(row, seen, positions=here, hidden_states=own)
            change = largest(alone - together[:, :, i : i + 1])
            if exceeds(change, ROUNDING):
                yield f"row {i} of {queries} x {keys} alone differs from the same row among others by {change:.3g}"


def strided(subject: CheckedNormalizer) -> Complaints:
    """Views - transposed, every second key, expanded - give what their contiguous copies give, gradients too."""
    logits = subject.logits(6, 14)
    views = {
        "transposed": subject.logits(7, 5).transpose(-1, -2),
        "strided": logits[..., ::2, ::2],
        "expanded": logits[:1].expand(3, -1, -1, -1),
    }
    for name, view in views.items():
        for mask in (None, some_mask(view.transpose(-1, -2)).transpose(-1, -2)):
            expected, found = subject.gradients(view.contiguous(), mask), subject.gradients(view, mask)
            change = max(largest(found[0] - expected[0]), largest(found[1] - expected[1]))
            if exceeds(change, ROUNDING):
                yield f"{name} logits differ from their contiguous copy by {change:.3g}"


def empty_batch(subject: CheckedNormalizer) -> Complaints:
    """No batch entries, or no queries, give empty weights and gradients, not an error."""
    for logits in (subject.logits(batch=0), subject.logits(queries=0)):
        for mask in (None, torch.ones(logits.shape[-2:], dtype=torch.bool)):
            weights, gradient, _ = subject.gradients(logits, mask)
            if weights.shape != logits.shape or gradient.shape != logits.shape:
                yield f"logits of shape {tuple(logits.shape)} give weights of shape {tuple(weights.shape)}"
