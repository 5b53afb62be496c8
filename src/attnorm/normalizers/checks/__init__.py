"""The checks of the normalizer contract, by name: small functions that yield a complaint for each broken promise."""

from attnorm.normalizers.checks import independence, numerics, promises
from attnorm.normalizers.checks.subject import CheckedNormalizer, CheckFunction, Complaints

CHECKS: dict[str, CheckFunction] = {
    check.__name__: check
    for check in (
        independence.runs,
        numerics.reference,
        promises.row_sums,
        promises.sign,
        promises.exact_zeros,
        promises.permutation,
        promises.shift,
        promises.lipschitz,
        independence.hidden_keys,
        independence.hidden_values,
        independence.visible_nan,
        independence.empty_rows,
        independence.padding,
        independence.mask_shapes,
        independence.single_key,
        independence.rows_alone,
        independence.strided,
        independence.empty_batch,
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
