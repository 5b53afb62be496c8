"""A row depends on its visible logits alone: not on hidden keys, other rows, shapes or strides."""

import math

import torch
from torch import Tensor

from attnorm.normalizers.block import Block, Positions
from attnorm.normalizers.checks.subject import CheckedNormalizer, Complaints, exceeds, largest, some_mask

ROUNDING = 1e-10


def hidden_keys(subject: CheckedNormalizer) -> Complaints:
    """A hidden key gets exactly 0, as weight and as gradient."""
    logits = subject.logits()
    hidden = ~some_mask(logits).expand(logits.shape)
    weights, gradient, _ = subject.gradients(logits, ~hidden)
    if exceeds(largest(weights[hidden]), 0):
        yield f"a hidden key gets weight {largest(weights[hidden])!r} instead of 0"
    if exceeds(largest(gradient[hidden]), 0):
        yield f"a hidden key gets gradient {largest(gradient[hidden])!r} instead of 0"


def hidden_values(subject: CheckedNormalizer) -> Complaints:
    """The value of a hidden logit, NaN and infinity included, affects neither weights nor gradients."""
    logits = subject.logits()
    mask = some_mask(logits)
    weights, gradient, parameters = subject.gradients(logits, mask)
    for value in (math.nan, math.inf, -math.inf, 1e30, torch.finfo(torch.float64).min):
        new_weights, new_gradient, new_parameters = subject.gradients(torch.where(mask, logits, value), mask)
        if not torch.equal(new_weights, weights):
            yield f"{value} in hidden logits changes a weight by {largest(new_weights - weights):.3g}"
        if not torch.equal(new_gradient, gradient):
            yield f"{value} in hidden logits changes a gradient by {largest(new_gradient - gradient):.3g}"
        for name, new_parameter_gradient in new_parameters.items():
            if not torch.equal(new_parameter_gradient, parameters[name]):
                yield f"{value} in hidden logits changes the gradient of {name} to {new_parameter_gradient.tolist()}"


def visible_nan(subject: CheckedNormalizer) -> Complaints:
    """A NaN in a visible logit makes its row NaN, and no other row: a broken model must not look healthy."""
    logits = subject.logits()
    mask = some_mask(logits)
    visible = _by_position(subject, logits, mask).expand(logits.shape)
    queries, keys = logits.shape[-2:]
    # Stick-breaking may skip a query's own key.
    is_own_key = torch.arange(keys) == torch.arange(keys - queries, keys)[:, None]
    for key in range(keys):
        broken = logits.clone()
        broken[..., key] = math.nan
        broken_rows = subject(broken, mask).isnan().any(-1)
        if not broken_rows[(visible & ~is_own_key)[..., key]].all():
            yield f"a NaN in the visible logit of key {key} gives a row of weights without NaN"
        if broken_rows[~mask.expand(logits.shape)[..., key]].any():
            yield f"a NaN in the hidden logit of key {key} gives a NaN weight"


def _by_position(subject: CheckedNormalizer, logits: Tensor, mask: Tensor) -> Tensor:
    """The mask without the keys that a selection hides because of their position, whatever their logits."""
    block = Block.of(logits, mask)
    for selection in subject.normalizer.selections:
        if not selection.permutation_equivariant:
            mask = mask & selection(block)
    return mask


def empty_rows(subject: CheckedNormalizer) -> Complaints:
    """A row that sees no key is all zeros, has gradient 0, disturbs no other row and no parameter's gradient."""
    logits = subject.logits()
    mask = some_mask(logits).clone()
    before, _, _ = subject.gradients(logits, mask)
    mask[0, :, 1] = False
    mask[1] = False
    empty = ~mask.any(-1).expand(logits.shape[:-1])
    weights, gradient, parameters = subject.gradients(logits, mask)
    for quantity, values in (("weight", weights), ("gradient", gradient)):
        if exceeds(largest(values[empty]), 0):
            yield f"a row without visible keys has a {quantity} of {largest(values[empty])!r} instead of 0"
    if exceeds(largest((weights - before)[~empty]), ROUNDING):
        yield f"an empty row changes another row's weight by {largest((weights - before)[~empty]):.3g}"
    for name, parameter_gradient in parameters.items():
        if not parameter_gradient.isfinite().all():
            yield f"with an empty row the gradient of {name} is {parameter_gradient.tolist()}"
    for name, parameter_gradient in subject.gradients(logits, torch.zeros_like(mask))[2].items():
        if exceeds(largest(parameter_gradient), 0):
            yield f"with empty rows only the gradient of {name} is {parameter_gradient.tolist()} instead of 0"


def padding(subject: CheckedNormalizer) -> Complaints:
    """Hidden keys before, behind or between the others change no weight, tokens keeping their positions."""
    queries, keys = 5, 7
    logits = subject.logits(queries, keys)
    mask = some_mask(logits)
    query = torch.arange(keys - queries, keys)
    expected = subject(logits, mask, positions=Positions(query, torch.arange(keys)))
    real = torch.arange(keys)
    columns = {"left": (real + 6, 13), "right": (real, 13), "both": (real + 3, 13), "between": (2 * real + 1, 15)}
    for padding_side, (key_columns, width) in columns.items():
        key = torch.full((width,), -1).scatter(0, key_columns, real)
        wide = torch.full((*logits.shape[:-1], width), 3.0, dtype=logits.dtype)
        wide[..., key_columns] = logits
        padded_mask = torch.zeros(*mask.shape[:-1], width, dtype=torch.bool)
        padded_mask[..., key_columns] = mask
        weights = subject(wide, padded_mask, positions=Positions(query, key))
        if exceeds(largest(weights[..., key_columns] - expected), ROUNDING):
            yield f"padding ({padding_side}) changes a weight by {largest(weights[..., key_columns] - expected):.3g}"
    counted = subject(torch.cat([logits, logits], -1), torch.cat([torch.zeros_like(mask), mask], -1))
    change = largest(counted[..., keys:] - subject(logits, mask))
    if exceeds(change, ROUNDING):
        yield f"padding (left), positions counted by default, changes a weight by {change:.3g}"


def mask_shapes(subject: CheckedNormalizer) -> Complaints:
    """A mask that broadcasts gives what the same mask gives when expanded."""
    logits = subject.logits()
    full = some_mask(logits)
    per_head = (torch.arange(subject.heads) % 2 == 0)[:, None, None] | full[0]
    views = (full[0, 0, 0], full[0, 0], full[:1], full[:, :, :1], full[:, :, :, -1:])
    for mask in (torch.tensor(True), *views, per_head, full):
        change = largest(subject(logits, mask) - subject(logits, mask.expand(logits.shape).contiguous()))
        if exceeds(change, ROUNDING):
            yield f"a mask of shape {tuple(mask.shape)} differs from the same one expanded by {change:.3g}"
    change = largest(subject(logits) - subject(logits, torch.ones_like(logits, dtype=torch.bool)))
    if exceeds(change, ROUNDING):
        yield f"no mask differs from a mask that hides nothing by {change:.3g}"


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
    own_key = torch.arange(263) == torch.arange(256, 263)[:, None]
    others_see_all = own_key | (torch.arange(7) % 3 > 0)[:, None]
    cases = ((alone, None), (alone, torch.ones(1, 1)), (among, torch.eye(5)), (long, own_key), (long, others_see_all))
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
            row_positions = Positions(positions[0][i : i + 1], positions[1])
            row, row_mask = logits[:, :, i : i + 1], mask[:, :, i : i + 1]
            row_states = None if hidden is None else hidden[:, i : i + 1]
            alone = subject(row, row_mask, positions=row_positions, hidden_states=row_states)
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
            expected, actual = subject.gradients(view.contiguous(), mask), subject.gradients(view, mask)
            change = max(largest(actual[0] - expected[0]), largest(actual[1] - expected[1]))
            if exceeds(change, ROUNDING):
                yield f"{name} logits differ from their contiguous copy by {change:.3g}"


def empty_batch(subject: CheckedNormalizer) -> Complaints:
    """No batch entries, or no queries, give empty weights and gradients, not an error."""
    for logits in (subject.logits(batch=0), subject.logits(queries=0)):
        for mask in (None, torch.ones(logits.shape[-2:], dtype=torch.bool)):
            weights, gradient, _ = subject.gradients(logits, mask)
            if weights.shape != logits.shape or gradient.shape != logits.shape:
                yield f"logits of shape {tuple(logits.shape)} give weights of shape {tuple(weights.shape)}"
