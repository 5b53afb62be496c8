"""Output layers that mix: several softmaxes (mos), or several contexts in front of one softmax (moc).

Yang et al. 2018, https://arxiv.org/abs/1711.03953. With the hidden state h, the output embedding W and K components:

    h_k = tanh(U_k h), pi = softmax(V h)
    mos:K   p = sum_k pi_k softmax(W h_k)     log p can have a rank above the width
    moc:K   p = softmax(W sum_k pi_k h_k)     the same parameters; the logits have at most the rank of the width

A mixture takes the place of the model's linear output layer and shares its weight, which may be the input embedding.
U and V are saved with the model's weights as `attnorm_latent` and `attnorm_prior`; its config names the mixture as
`attnorm_output`. Transformers without attnorm reports both as unexpected weights and runs one linear softmax.
"""

import re
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SOFTMAX = "softmax"
OUTPUT = "attnorm_output"  # attribute of a model's config
SAVED = re.compile(r"(?:^|\.)attnorm_(latent|prior)$")
SPEC = re.compile(r"(mos|moc):([0-9]{1,3})")
PRIOR_SPREAD = 0.02  # as transformers initializes linear layers: all components start with nearly equal weight


def parse_output(spec: str) -> tuple[str, int] | None:
    """Return kind and number of components, or None for the model's own softmax.

    Raises:
        ValueError: Neither softmax, nor mos:K or moc:K with K from 2 to 64.

    >>> parse_output("mos:4")
    ('mos', 4)
    """
    match = SPEC.fullmatch(spec)
    if spec != SOFTMAX and (match is None or not 2 <= int(match[2]) <= 64):
        raise ValueError(f"output: expected softmax, mos:K or moc:K with K from 2 to 64, e.g. mos:4, got {spec!r}")
    return None if match is None else (match[1], int(match[2]))


class MixtureHead(nn.Linear):
    """The output layer of a mixture. Of mos it returns log-probabilities in float32, of moc logits."""

    def __init__(self, weight: Tensor, kind: str, components: int) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight, self.kind, self.components = weight, kind, components
        self.register_parameter("bias", None)
        width = self.in_features
        self.attnorm_latent = nn.Parameter(weight.new_empty(components * width, width))
        self.attnorm_prior = nn.Parameter(weight.new_empty(components, width))
        # The norm in front of the output leaves h with entries of size 1: U h has them too, and tanh does not saturate.
        nn.init.normal_(self.attnorm_latent, std=width**-0.5)
        nn.init.normal_(self.attnorm_prior, std=PRIOR_SPREAD)

    @property
    def spec(self) -> str:
        return f"{self.kind}:{self.components}"

    def forward(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocabulary"]:
        contexts, log_prior = self._components(hidden)
        if self.kind == "moc":
            return F.linear(_mix_contexts(contexts, log_prior), self.weight)
        total = None  # one component after the other: K x vocabulary numbers are never held at once
        for index, context in enumerate(contexts):
            part = log_prior[..., index, None] + torch.log_softmax(F.linear(context, self.weight).float(), -1)
            total = part if total is None else torch.logaddexp(total, part)
        assert total is not None
        return total

    def loss(self, hidden: Float[Tensor, "*batch width"], targets: Int64[Tensor, "*batch"]) -> Float[Tensor, ""]:
        """Return the mean of -log p(target). The backward pass computes the logits of each component again."""
        contexts, log_prior = self._components(hidden)
        if self.kind == "moc":
            return -_target_log_probability(_mix_contexts(contexts, log_prior), self.weight, targets).mean()
        log_probabilities = [
            checkpoint(_target_log_probability, context, self.weight, targets, use_reentrant=False)
            for context in contexts
        ]
        return -torch.logsumexp(log_prior + torch.stack(log_probabilities, -1), -1).mean()

    def _components(self, hidden: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return h_k of every component, and the log of their weights in float32."""
        contexts = torch.tanh(F.linear(hidden, self.attnorm_latent)).chunk(self.components, -1)
        return contexts, torch.log_softmax(F.linear(hidden, self.attnorm_prior).float(), -1)


def _mix_contexts(contexts: tuple[Tensor, ...], log_prior: Tensor) -> Tensor:
    weights = log_prior.exp().to(contexts[0].dtype)
    return (torch.stack(contexts, -1) * weights[..., None, :]).sum(-1)


def _target_log_probability(context: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(context, weight).flatten(0, -2).float()
    return -F.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)


def set_output(model: Any, spec: str) -> None:
    """Put a mixture with random weights in the place of the model's linear output layer; softmax changes nothing.

    Raises:
        ValueError: The output layer has a bias, or the model has none.
    """
    parsed = parse_output(spec)
    if parsed is None:
        return
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
        raise ValueError(
            f"expected a linear output layer without bias for {spec}, got {head} in {type(model).__name__}"
        )
    model.set_output_embeddings(MixtureHead(head.weight, *parsed).train(model.training))
    setattr(model.config, OUTPUT, spec)


def has_saved_output(directory: Any, **files: Any) -> bool:
    """Whether the weights of a folder or hub repository hold a mixture. files: as for read_weights."""
    return bool(_read_saved_weights(directory, files))


def restore_output(model: Any, directory: Any, **files: Any) -> None:
    """Put the mixture that was saved with a model back in its place; other models stay as they are.

    Raises:
        ValueError: The saved values are missing or do not fit.
    """
    spec = getattr(model.config, OUTPUT, None)
    if spec is None or not callable(getattr(model, "set_output_embeddings", None)):
        return
    if model.get_output_embeddings() is None:  # the base model alone
        return
    saved = {key.rpartition(".")[2]: value for key, value in _read_saved_weights(directory, files).items()}
    set_output(model, str(spec))
    head = model.get_output_embeddings()
    with torch.no_grad():
        for name in ("attnorm_latent", "attnorm_prior"):
            target, value = getattr(head, name), saved.get(name)
            if value is None or value.shape != target.shape:
                got = "none" if value is None else tuple(value.shape)
                raise ValueError(
                    f"{directory}: expected {name} of shape {tuple(target.shape)} for the output layer {spec}, got "
                    f"{got}. Save the model again."
                )
            target.copy_(value)


def _read_saved_weights(directory: Any, files: dict[str, Any]) -> dict[str, Tensor]:
    from attnorm.models.recipe import read_weights  # imports transformers, which a plan does not need

    return read_weights(directory, SAVED, **files)
