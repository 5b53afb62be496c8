"""The checks of the normalizer contract, by name: small functions that yield a complaint for each broken promise."""

from attnorm.normalizers.checks import gradients, masking, precision, promises, shapes
from attnorm.normalizers.checks.subject import CheckedNormalizer, CheckFunction, Complaints

CHECKS: dict[str, CheckFunction] = {
    check.__name__: check
    for check in (
        shapes.runs,
        precision.reference,
        promises.row_sums,
        promises.sign,
        promises.exact_zeros,
        promises.permutation,
        promises.shift,
        promises.lipschitz,
        masking.hidden_keys,
        masking.hidden_values,
        masking.visible_nan,
        masking.empty_rows,
        masking.padding,
        masking.mask_shapes,
        shapes.single_key,
        shapes.rows_alone,
        shapes.strided,
        shapes.empty_batch,
        precision.half_precision,
        precision.single_precision,
        precision.large_logits,
        precision.large_precision,
        gradients.first_derivative,
        gradients.second_derivative,
        gradients.compiled,
    )
}

__all__ = ["CHECKS", "CheckFunction", "CheckedNormalizer", "Complaints"]
