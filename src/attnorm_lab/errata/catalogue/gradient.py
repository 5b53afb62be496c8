"""Claims on Jacobians: Lemma 2, Corollary 3, the finite difference of Fig. 4, the toy of section 2.3, entmax."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.entmax import Entmax
from attnorm.normalizers.kernel import FUNCTIONS
from attnorm.theory import gradient
from attnorm_lab.errata.catalogue.claim import EXACTLY, NEARLY, CaseSizes, Claim, ClaimCase, at_most, between, equals

DOC = "docs/theory/gradient.md"
EXACT, KERNEL = f"{DOC}#3-the-exact-norm-of-a-threshold-map-in-ol", f"{DOC}#4-the-exact-norm-of-fsum-f-in-ol"
LEMMA2 = f"{DOC}#1-lemma-2"
WORST = f"{DOC}#5-worst-case-of-alpha-entmax-over-all-rows-of-n-keys"

claim = partial(Claim, family="gradient")
added = partial(claim, form="added", status="holds")
corrected = partial(claim, form="corrected", status="holds")

ALPHAS = (1.2, 1.5, 1.8)
KERNELS = 4  # functions F in _kernel
ROUNDING = 1e-12


def _kernel(case: ClaimCase) -> tuple[Tensor, Tensor]:
    """F and F' on each row: softplus, elu + 1, or the line F(l) = l on positive logits, of any shape or one winner."""
    z = case.scaled
    from_catalogue = [(FUNCTIONS[name].value(z), FUNCTIONS[name].derivative(z)) for name in ("softplus", "elu+1")]
    lines = [
        z - z.amin(-1, keepdim=True) + 1 / case.keys,
        torch.where(torch.arange(case.keys) == 0, case.dial[:, None], 1 / case.keys),
    ]
    rows = from_catalogue + [(line, torch.ones_like(line)) for line in lines]
    kernel_index = (case.pick % KERNELS)[None, :, None].expand(1, -1, case.keys)
    values, slopes = (torch.stack(parts).gather(0, kernel_index)[0] for parts in zip(*rows, strict=True))
    return values, slopes


def _lemma2(case: ClaimCase, bound: Callable[..., Tensor]) -> Tensor:
    row = _kernel(case)
    return at_most(gradient.kernel_jacobian_norm(*row), bound(*row))


def _kernel_norm(case: ClaimCase) -> Tensor:
    """The O(L) norm against the singular value of the matrix, which is exact to rounding of its largest entries."""
    values, slopes = _kernel(case)
    total = values.sum(-1, keepdim=True)
    identity = torch.eye(case.keys, dtype=values.dtype)
    jacobian = (identity - (values / total)[..., :, None]) * (slopes / total)[..., None, :]
    scale = (slopes / total).amax(-1)
    return equals(
        gradient.kernel_jacobian_norm(values, slopes), torch.linalg.matrix_norm(jacobian, ord=2), 1e-9 * scale
    )


def _softmax_norm(case: ClaimCase) -> Tensor:
    return gradient.entmax_jacobian_norm(case.weights, temperature=case.temperature)


def _slopes(case: ClaimCase) -> Tensor:
    """u = a^(2 - alpha) for softmax, entmax15 or sparsemax weights a."""
    return torch.stack(
        [gradient.entmax_slopes(_entmax_weights(case, alpha), alpha) for alpha in (1.0, 1.5, 2.0)]
    ).gather(0, (case.pick % 3)[None, :, None].expand(1, -1, case.keys))[0]


def _threshold_norm(case: ClaimCase) -> Tensor:
    u = _slopes(case)
    jacobian = torch.diag_embed(u) - u[..., :, None] * (u / u.sum(-1, keepdim=True))[..., None, :]
    norm = gradient.threshold_jacobian_norm(u, case.temperature) * case.temperature
    return equals(norm, torch.linalg.matrix_norm(jacobian, ord=2), 1e-9 * u.amax(-1))


def _bracket(case: ClaimCase) -> Tensor:
    ratios = []
    for alpha in (1.0, 1.5, 2.0):
        weights = _entmax_weights(case, alpha)
        norm = gradient.entmax_jacobian_norm(weights, alpha, case.temperature)
        ratios.append(between(norm, *gradient.entmax_norm_bracket(weights, alpha, case.temperature)))
    return case.picked(ratios)


def _gain(case: ClaimCase, bound: Callable[..., Tensor]) -> Tensor:
    """The finite difference along the worst direction of the Jacobian, either way."""
    a = case.weights
    jacobian = torch.diag_embed(a) - a[..., :, None] * a[..., None, :]
    worst = torch.linalg.eigh(jacobian).eigenvectors[..., -1]
    ratios = []
    for logits, direction, dial in zip(case.logits, worst, case.dial.tolist(), strict=True):
        epsilon = dial * 4 * case.temperature
        gains = gradient.finite_difference_gain(
            lambda z: torch.softmax(z, dim=-1),
            logits,
            epsilon,
            temperature=case.temperature,
            directions=torch.stack([direction, -direction]),
        )
        ratios.append(at_most(gains.amax(), bound(epsilon, case.temperature)))
    return torch.stack(ratios)


def _toy(case: ClaimCase, *, printed: bool) -> Tensor:
    """Two leading logits 30 T above the rest that swap, a small step; "about": within 2 %, 0.2 % of our own."""
    ratios = []
    for dial in case.dial.clamp(max=10).tolist():
        example = gradient.swap_example(
            30 * case.temperature, 1e-4 * dial * case.temperature, case.temperature, case.keys
        )
        expected = example.printed if printed else example.corrected
        ratios.append(abs(example.weight_distance / expected - 1) / (0.02 if printed else 0.002))
    return torch.tensor(ratios, dtype=torch.float64)


def _entmax_weights(case: ClaimCase, alpha: float) -> Tensor:
    weights: Tensor = Normalizer(Entmax(alpha))(case.scaled) if alpha > 1 else case.weights
    return weights


def _entmax(case: ClaimCase, bound: Callable[[int, float], float]) -> Tensor:
    """T ||J|| of entmax, for one alpha on each row."""
    ratios = []
    for alpha in ALPHAS:
        norm = gradient.entmax_jacobian_norm(_entmax_weights(case, alpha), alpha)
        ratios.append(norm / bound(case.keys, alpha))
    return case.picked(ratios)


def _entmax_worst(case: ClaimCase) -> Tensor:
    """No row exceeds the constant, and the row that is said to attain it does, for this very alpha and n."""
    searched = _entmax(case, gradient.entmax_worst_norm)
    at_worst = []
    for alpha in ALPHAS:
        worst = gradient.entmax_worst_weights(case.keys, alpha)
        norm = gradient.entmax_jacobian_norm(worst, alpha)
        constant = gradient.entmax_worst_norm(case.keys, alpha)
        at_worst.append(equals(norm, torch.full_like(norm, constant), 1e-9).expand_as(case.dial))
    return torch.stack([searched, case.picked(at_worst)], -1)


CLAIMS = [
    claim(
        id="lemma-2",
        proof=LEMMA2,
        source="Mudarisov et al., Lemma 2",
        form="printed",
        statement="||J|| <= min{ ||F'|| (1/(L F_min) + ||F||/(L^2 F_min^2)), sqrt 2 }",
        domain="a = F(l)/sum F(l), F > 0",
        status="false",
        counterexample="F(l) = l, L = 256, one F = 1, the rest 1/256: true 4.02, printed 1.41",
        correction="lemma-2-corrected",
        ratio=lambda case: _lemma2(case, gradient.lemma2_printed),
        differentiable=False,
    ),
    corrected(
        id="lemma-2-corrected",
        proof=LEMMA2,
        source="Lemma 2, corrected",
        statement="||J|| <= max|F'| sqrt(L) ||a|| / sum F, an equality where |F'| is constant",
        domain="a = F(l)/sum F(l), F >= 0",
        ratio=lambda case: _lemma2(case, gradient.lemma2_corrected),
        differentiable=False,
        attained=(EXACTLY,),
    ),
    claim(
        id="corollary-3",
        proof=f"{DOC}#2-corollary-3-softmax",
        source="Mudarisov et al., Corollary 3",
        form="printed",
        statement="||J|| <= min{1/(4T), sqrt 2}",
        domain="softmax",
        status="false",
        counterexample="two equal logits: 1/(2T); 1/(4T) is the largest entry",
        correction="corollary-3-corrected",
        ratio=lambda case: at_most(_softmax_norm(case), gradient.corollary3_printed(case.temperature)),
    ),
    corrected(
        id="corollary-3-corrected",
        proof=f"{DOC}#2-corollary-3-softmax",
        source="Nair 2025",
        statement="||J|| <= 1/(2T), attained",
        domain="softmax",
        ratio=lambda case: at_most(_softmax_norm(case), gradient.corollary3_corrected(case.temperature)),
        attained=(NEARLY,),
    ),
    added(
        id="corollary-3-local",
        proof=f"{DOC}#2-corollary-3-softmax",
        source="added",
        statement="||J|| <= max_j 2 a_j (1 - a_j)/T",
        domain="softmax",
        ratio=lambda case: at_most(_softmax_norm(case), gradient.corollary3_local(case.weights, case.temperature)),
        attained=(EXACTLY,),
    ),
    added(
        id="jacobian-norm-exact",
        proof=EXACT,
        source="added",
        statement="the secular equation gives ||J|| in O(L), equal to the singular value of the full matrix",
        domain="threshold maps; searched on softmax, entmax15 and sparsemax",
        ratio=_threshold_norm,
        differentiable=False,
    ),
    added(
        id="kernel-norm-exact",
        proof=KERNEL,
        source="added",
        statement="diagonal plus rank two: ||J|| of F/sum F in O(L), equal to the singular value of the full matrix",
        domain="a = F(l)/sum F(l), F >= 0",
        ratio=_kernel_norm,
        differentiable=False,
    ),
    added(
        id="jacobian-norm-bracket",
        proof=EXACT,
        source="added",
        statement="u_(2) <= T ||J|| <= min(u_(1), max 2 u (1 - u/sum u))",
        domain="entmax family; searched on softmax, entmax15 and sparsemax",
        ratio=_bracket,
        attained=(EXACTLY, EXACTLY),
    ),
    claim(
        id="figure-4",
        proof=f"{DOC}#6-finite-differences-and-random-directions",
        source="Mudarisov et al., Fig. 4",
        form="printed",
        statement="g(T, eps) <= min{1/(4T), sqrt 2}",
        domain="softmax, any direction",
        status="false",
        counterexample="two equal logits, a small step between them: 1/(2T)",
        correction="figure-4-corrected",
        ratio=lambda case: _gain(case, lambda epsilon, T: gradient.corollary3_printed(T)),
        differentiable=False,
    ),
    corrected(
        id="figure-4-corrected",
        proof=f"{DOC}#6-finite-differences-and-random-directions",
        source="Fig. 4, corrected",
        statement="g(T, eps) <= min{1/(2T), sqrt(2)/eps}",
        domain="softmax, any direction",
        ratio=lambda case: _gain(case, gradient.finite_difference_corrected),
        differentiable=False,
        attained=(NEARLY,),
    ),
    claim(
        id="toy-2.3",
        proof=f"{DOC}#7-the-toy-of-section-23",
        source="Mudarisov et al., section 2.3",
        form="printed",
        statement="swapping two leading logits moves the weights by about sqrt(2) eps/T",
        domain="softmax, two logits far above the rest, small eps",
        status="false",
        counterexample="the limit is (3 sqrt(2)/4) eps/T = 1.06 eps/T",
        correction="toy-2.3-corrected",
        ratio=lambda case: _toy(case, printed=True),
        differentiable=False,
    ),
    corrected(
        id="toy-2.3-corrected",
        proof=f"{DOC}#7-the-toy-of-section-23",
        source="section 2.3, corrected",
        statement="swapping two leading logits moves the weights by about (3 sqrt(2)/4) eps/T",
        domain="softmax, two logits far above the rest, small eps",
        ratio=lambda case: _toy(case, printed=False),
        differentiable=False,
    ),
    claim(
        id="entmax-constant",
        proof=WORST,
        source="a plausible generalization of 1/(2T)",
        form="added",
        statement="||J|| <= 2^(alpha-2)/T for alpha-entmax",
        domain="1 < alpha < 2",
        status="false",
        counterexample="alpha = 1.5 from 48 keys on: 0.726 at 64, 0.868 at 1024",
        correction="entmax-worst-case",
        ratio=lambda case: _entmax(case, lambda n, alpha: 2 ** (alpha - 2)),
        sizes=CaseSizes(least_keys=64),
    ),
    added(
        id="entmax-worst-case",
        proof=WORST,
        source="added",
        statement="||J|| <= max(lambda_2, lambda_n)/T for alpha-entmax over n keys, attained; at most 1/T",
        domain="1 <= alpha <= 2",
        ratio=_entmax_worst,
        attained=(NEARLY, None),
    ),
]
