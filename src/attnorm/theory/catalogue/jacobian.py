"""Norms of Jacobians by autograd, from the map itself and nothing else: what the formulas are checked against."""

from collections.abc import Callable

import torch
from torch import Tensor

FULL = 16  # keys up to which the whole Jacobian is formed
PROBES = 6  # steps of power iteration beyond


@torch.enable_grad()
def jacobian_norm(row_map: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    """||J|| of each row (rows, L), or a lower bound on it for more than 16 keys: so a violation is always real.

    A vector w gives ||J^T w|| / ||w|| <= ||J||; with full Jacobians all of them are at hand.
    """
    z = logits.detach().clone().requires_grad_()
    keys = z.shape[-1]
    weights = row_map(z)
    if not weights.requires_grad:
        return torch.zeros_like(logits[:, 0])
    if keys <= FULL:
        columns = [torch.autograd.grad(weights[:, j].sum(), z, retain_graph=True)[0] for j in range(keys)]
        norms: Tensor = torch.linalg.matrix_norm(torch.stack(columns, dim=1), ord=2)
        return norms
    # Start: one weight against the others, the worst direction of rows with one or two leaders.
    leader = torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    second = (logits - 1e300 * leader).argmax(-1, keepdim=True)
    norm = torch.zeros_like(logits[:, 0])
    for start in (leader - 1 / keys, leader.scatter(-1, second, -1.0)):
        direction = start
        for _ in range(PROBES // 2):
            left = direction / direction.norm(dim=-1, keepdim=True).clamp(min=1e-300)
            (direction,) = torch.autograd.grad(weights, z, left, retain_graph=True)
            norm = torch.maximum(norm, direction.norm(dim=-1))
    return norm
