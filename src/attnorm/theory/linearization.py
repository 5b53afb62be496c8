"""Jacobian-vector products of an arbitrary row map by autograd, and the norm of its Jacobian by power iteration.

A row map turns logits (..., L) into weights (..., L), each row by itself. Only its backward pass is needed: J^T w is
linear in w, so differentiating it once more with respect to w gives J v (the double-backward trick). This works for
custom autograd functions without a forward-mode rule, as long as their backward is itself differentiable.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnorm.theory.selection import visible_keys

RowMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Linearization:
    """A row map at a point: its weights, and products with its Jacobian (one per row)."""

    weights: Float[Tensor, "*rows L"]
    jvp: Callable[[Tensor], Tensor]  # v -> J v
    vjp: Callable[[Tensor], Tensor]  # w -> J^T w


def linearize(row_map: RowMap, logits: Float[Tensor, "*rows L"]) -> Linearization:
    """The map at these logits; the forward pass runs once, each product costs one or two backward passes."""
    point = logits.detach().requires_grad_()
    with torch.enable_grad():
        weights = row_map(point)
        if weights.shape != point.shape:
            raise ValueError(
                f"a row map keeps the shape of its logits: got {tuple(weights.shape)} from {tuple(point.shape)}"
            )
        probe = torch.zeros_like(weights, requires_grad=True)
        pulled = _product(weights, point, probe, create_graph=True)

    def vjp(w: Tensor) -> Tensor:
        return _product(weights, point, w)

    def jvp(v: Tensor) -> Tensor:
        return _product(pulled, probe, v)

    return Linearization(weights.detach(), jvp, vjp)


def power_iteration_norm(
    row_map: RowMap,
    logits: Float[Tensor, "*rows L"],
    *,
    iterations: int = 200,
    tolerance: float = 1e-9,
    mask: Bool[Tensor, "..."] | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "*rows"]:
    """||J|| of any row map, from below: ||J v|| for v after repeated J^T J, never above the norm itself.

    Stops when no row gains more than `tolerance` (relative) in a step. Hidden keys (mask False) are not perturbed.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    linearization = linearize(row_map, logits)
    return linearized_norm(
        linearization, logits, iterations=iterations, tolerance=tolerance, mask=mask, generator=generator
    )


def linearized_norm(
    at: Linearization,
    logits: Float[Tensor, "*rows L"],
    *,
    iterations: int = 200,
    tolerance: float = 1e-9,
    mask: Bool[Tensor, "..."] | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "*rows"]:
    """The same for a map whose products with its Jacobian at the logits are known."""
    v = random_directions(logits, 1, mask, generator)[0]
    norm = torch.zeros_like(logits[..., 0])
    for _ in range(iterations):
        moved = at.jvp(v)
        previous, norm = norm, torch.maximum(norm, torch.linalg.vector_norm(moved, dim=-1))
        if bool((norm - previous <= tolerance * norm).all()):
            break
        v = _unit(torch.where(visible_keys(logits, mask), at.vjp(moved), 0.0))
    return norm


def random_directions(
    logits: Float[Tensor, "*rows L"],
    samples: int,
    mask: Bool[Tensor, "..."] | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "k *rows L"]:
    """Unit vectors, uniform on the sphere of the visible keys; zero in a row without any."""
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    noise = torch.randn((samples, *logits.shape), dtype=logits.dtype, device=logits.device, generator=generator)
    noise = torch.where(visible_keys(logits, mask), noise, 0.0)
    return _unit(noise)


def _unit(v: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return v / length.clamp(min=torch.finfo(v.dtype).tiny)


def _product(outputs: Tensor, inputs: Tensor, vector: Tensor, create_graph: bool = False) -> Tensor:
    result = None
    if outputs.requires_grad:
        (result,) = torch.autograd.grad(
            outputs, inputs, vector, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
    if result is None:
        raise ValueError(
            "the row map cannot be differentiated (twice, for J v): its graph does not reach the logits; "
            "write its backward pass with differentiable operations, or measure it by finite differences"
        )
    return result


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
