"""Sums over all tokens, sum_l a_l b_l^T, which attention of linear cost computes once for all queries."""

from torch import Tensor

from attnorm.normalizers.block import is_exporting

CHUNK = 512  # tokens of one product
ENOUGH_PRODUCTS = 256  # that keep a GPU busy


def sum_over_tokens(a: Tensor, b: Tensor) -> Tensor:
    """Return a^T b, (..., m, d), of a (..., L, m) and b (..., L, d).

    A GPU computes each of these products in a single program, which reads all tokens. A few long ones are divided into
    chunks of tokens, whose products are added; not in an exported graph, where their number may vary.
    """
    products, tokens = a.shape[:-2].numel(), a.shape[-2]
    if not a.is_cuda or is_exporting() or products >= ENOUGH_PRODUCTS or tokens < 2 * CHUNK:
        return a.transpose(-1, -2) @ b
    return _sum_by_chunks(a, b)


def _sum_by_chunks(a: Tensor, b: Tensor) -> Tensor:
    chunked_length = a.shape[-2] // CHUNK * CHUNK
    chunks_of_a, chunks_of_b = (t[..., :chunked_length, :].unflatten(-2, (-1, CHUNK)) for t in (a, b))
    total: Tensor = (chunks_of_a.transpose(-1, -2) @ chunks_of_b).sum(-3)
    return total + a[..., chunked_length:, :].transpose(-1, -2) @ b[..., chunked_length:, :]
