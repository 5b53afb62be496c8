"""RXNMapper's ALBERT, a model whose attention is right for a known reason, fetched from the package index.

Schwaller et al. 2021, https://doi.org/10.1126/sciadv.abe4166: a model trained to fill masked tokens of chemical
reactions maps the atoms of the product to those of the reactants by one of its attention heads: layer 10, head 5,
counted from 0. The model comes inside the wheel `rxnmapper` (MIT), which is checked against a known hash and never
installed.
"""

import re
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AlbertConfig, AlbertForMaskedLM

from attnorm.files import atomic_replace
from attnorm.models.load import LoadedModel, load
from attnorm.models.smollm2 import CannotFetch, download_wheel

WHEEL = "rxnmapper==0.4.3"
SHA256 = "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5"
INSIDE = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/"
FILES = ("config.json", "model.safetensors", "vocab.txt")
MAPPING_HEAD = (10, 5)  # layer and head that the authors use
# Brackets, two-letter elements, one-letter elements (lower case: aromatic), bonds, branches, rings.
TOKEN = re.compile(r"\[[^\]]+\]|Br|Cl|>>|%\d\d|[A-Za-z]|\d|[^\s]")
ATOM = re.compile(r"\[[^\]]+\]|Br|Cl|[BCNOPSFIbcnops]$")


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
    model_class: Any = AlbertForMaskedLM
    model = model_class(AlbertConfig.from_pretrained(source))
    weights = torch.load(source / "pytorch_model.bin", map_location="cpu", weights_only=True)
    missing = model.load_state_dict(weights, strict=False).missing_keys
    if absent := [name for name in missing if "attention" in name or "embeddings.word" in name]:
        raise CannotFetch(f"the weights of {WHEEL} lack {absent[0]}, as this version of transformers names it")
    model.save_pretrained(target)


def load_mapper(folder: Path) -> LoadedModel:
    return load(folder, device="cpu")


def tokens_of(reaction: str) -> list[str]:
    """Split a reaction SMILES into the tokens of the model, with [CLS] and [SEP]."""
    return ["[CLS]", *TOKEN.findall(reaction), "[SEP]"]


def is_atom(token: str) -> bool:
    return token not in ("[CLS]", "[SEP]") and ATOM.match(token) is not None


def ids_of(tokens: list[str], folder: Path) -> Tensor:
    """Return token ids, (1, L). A token that the vocabulary lacks raises ValueError."""
    vocabulary = {word: index for index, word in enumerate((folder / "vocab.txt").read_text().splitlines())}
    unknown = [token for token in tokens if token not in vocabulary]
    if unknown:
        raise ValueError(f"the vocabulary of {WHEEL} has no token {unknown[0]!r}")
    return torch.tensor([[vocabulary[token] for token in tokens]])
