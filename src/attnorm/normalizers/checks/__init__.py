"""The checks of the normalizer contract, by name: small functions that yield a complaint for each broken promise."""

from attnorm.normalizers.checks import numerics, promises
from attnorm.normalizers.checks.subject import CheckedNormalizer, CheckFunction, Complaints

CHECKS: dict[str, CheckFunction] = {
    check.__name__: check
    for check in (
        promises.runs,
        numerics.reference,
        promises.row_sums,
        promises.sign,
        promises.exact_zeros,
        promises.permutation,
        promises.shift,
        promises.lipschitz,
        promises.hidden_keys,
        promises.hidden_values,
        promises.visible_nan,
        promises.empty_rows,
        promises.padding,
        promises.mask_shapes,
        promises.single_key,
        promises.rows_alone,
        promises.strided,
        promises.empty_batch,
        numerics.half_precision,
        numerics.single_precision,
        numerics.large_logits,
        numerics.large_precision,
        numerics.first_derivative,
        numerics.second_derivative,
        numerics.compiled,
    )
}

__all__ = ["CHECKS", "CheckFunction", "CheckedNormalizer", "Complaints"]
