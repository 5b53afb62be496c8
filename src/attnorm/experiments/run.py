"""Runs experiments and writes what they give; what is finished is not done again.

OUT/index.html          pictures and verdicts of all experiments in the folder
OUT/NAME/               one finished experiment, there whole or not at all:
    verdict.md          the verdict in words, and the findings
    outcome.json        findings, parameters, and the manifest: model, texts, versions
    *.svg *.png *.pdf   figures              *.csv *.parquet   tables
OUT/parts/NAME-KEY/     what a long experiment keeps while it runs, and goes on from after a stop; gone at its end where
                        nothing else needs it
"""

import contextlib
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from attnorm.analysis.manifest import now, versions
from attnorm.experiments.catalogue import named
from attnorm.experiments.experiment import Experiment, Outcome, Subject, Tell
from attnorm.experiments.figures.style import save, style
from attnorm.experiments.index_page import write_index
from attnorm.experiments.paper_setting import setting
from attnorm.experiments.refusals import refuse_short_texts, refuse_unused_options
from attnorm.report.analysis_json import finite
from attnorm.training.atomic import remove_drafts, replacing

OUTCOME = "outcome.json"
PARTS = "parts"
SCHEMA = 1


@dataclass(frozen=True)
class Written:
    """A finished experiment on the disk."""

    name: str
    folder: Path
    record: Mapping[str, Any]  # outcome.json
    found: bool  # it was there already

    @property
    def findings(self) -> list[dict[str, str]]:
        return list(self.record["findings"])


def reproduce(
    names: Iterable[str],
    subject: Subject,
    out: Path,
    *,
    fresh: bool = False,
    tell: Tell = lambda what, done, total: None,
    command: str = "",
) -> list[Written]:
    """Runs the experiments of these names and writes them to the folder, with an index page over all that is there.

    fresh: also those that are finished, from the start.

    Raises:
        ValueError: An experiment that does not exist, that ignores an option that was given, whose text is too short,
            or whose place in the folder holds one of other settings.
    """
    chosen = named(names)
    refuse_unused_options(chosen, subject)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; name a folder for the output")
    refuse_short_texts(chosen, subject)
    identities = [_identity(one, subject) for one in chosen]
    if not fresh:
        for one, identity in zip(chosen, identities, strict=True):
            _refuse_other_settings(out / one.name, identity)
    _make(out)
    remove_drafts(out)
    written = []
    for place, (one, identity) in enumerate(zip(chosen, identities, strict=True)):

        def told(what: str, done: int, total: int, name: str = one.name) -> None:
            tell(f"{name}: {what}" if what else name, done, total)

        tell(f"{one.name} ({place + 1} of {len(chosen)})", 0, 1)
        written.append(_one(one, subject, identity, out, fresh, told, command))
        write_index(out)
    return written


def _one(
    one: Experiment, subject: Subject, identity: dict[str, Any], out: Path, fresh: bool, tell: Tell, command: str
) -> Written:
    folder = out / one.name
    if not fresh and (record := _finished(folder, identity)):
        tell("found finished", 1, 1)
        return Written(one.name, folder, record, found=True)
    parts = out / PARTS / f"{one.name}-{_key(identity)}"
    if fresh:
        shutil.rmtree(parts, ignore_errors=True)
    started = time.perf_counter()
    with style():
        outcome = one.run(subject, tell, parts)
        manifest = {
            "created": now(),
            "seconds": round(time.perf_counter() - started, 1),
            "command": command,
            "versions": versions(),
            **_model(one, subject),
        }
        record = _record(one, outcome, identity, manifest)
        _write(folder, outcome, record)
    if one.passing:
        _clear(parts)
    return Written(one.name, folder, record, found=False)


def _clear(parts: Path) -> None:
    shutil.rmtree(parts, ignore_errors=True)
    with contextlib.suppress(OSError):  # others have theirs there
        parts.parent.rmdir()


def _identity(one: Experiment, subject: Subject) -> dict[str, Any]:
    told = {"experiment": one.name, **subject.identity(with_model=one.needs_model)}
    plain: dict[str, Any] = json.loads(json.dumps(told))
    return plain


def _key(identity: Mapping[str, Any]) -> str:
    """Parts of a long experiment serve every choice among them."""
    decisive = {name: value for name, value in identity.items() if name != "only"}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:12]


def _model(one: Experiment, subject: Subject) -> dict[str, Any]:
    """Of the manifest: the model, or all that were compared; and whether this is how the paper did it."""
    if not one.needs_model:
        return {}
    models = [each.described() for each in subject.each()]
    text = subject.passages()[0]
    same = setting(one.name, models[0], text.name, text.content, quick=subject.quick)
    return {"model": models[0], **({"others": models[1:]} if models[1:] else {}), **same}


def _record(one: Experiment, outcome: Outcome, identity: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = finite(
        {
            "schema": SCHEMA,
            "name": one.name,
            "title": one.title,
            "source": one.source,
            "question": one.question,
            "words": outcome.words,
            "findings": [finding.as_dict() for finding in outcome.findings],
            "figures": list(outcome.figures),
            "tables": {name: table.num_rows for name, table in outcome.tables.items()},
            "parameters": dict(outcome.parameters),
            "settings": identity,
            "manifest": manifest,
        }
    )
    return record


def _write(folder: Path, outcome: Outcome, record: dict[str, Any]) -> None:
    with replacing(folder) as draft:
        draft.mkdir(parents=True)
        for name, figure in outcome.figures.items():
            save(figure, draft / name)
        for name, table in outcome.tables.items():
            pa.csv.write_csv(table, draft / f"{name}.csv")
            pa.parquet.write_table(table, draft / f"{name}.parquet", compression="zstd")
        (draft / "verdict.md").write_text(_verdict_page(record), encoding="utf-8")
        text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False, default=_plain)
        (draft / OUTCOME).write_text(text + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    """Paths, and numbers of NumPy and torch, which experiments put among their parameters."""
    if isinstance(value, Path):
        return value.name
    if hasattr(value, "tolist"):
        return finite(value.tolist())
    raise TypeError(f"parameters must be plain values, got {value!r} of type {type(value).__name__}")


def _verdict_page(record: Mapping[str, Any]) -> str:
    """As Markdown: the words, then one row per claim."""
    lines = [f"# {record['title']}", "", f"{record['source']}. {record['question']}", "", record["words"], ""]
    if same := record["manifest"].get("paper_setting"):
        lines += [same["told"], ""]
    if record["findings"]:
        lines += ["| claim | ours | verdict | why |", "|---|---|---|---|"]
        for finding in record["findings"]:
            cells = (
                finding[name].replace("|", "\\|").replace("\n", " ") for name in ("claim", "ours", "verdict", "why")
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _make(out: Path) -> None:
    """Makes the folder, and finds out that it cannot be written before an experiment takes its time."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(f"cannot write into {out}: {error.strerror}; choose another folder with --out") from None


def _finished(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record of a finished run with these settings by this version of attnorm, or None."""
    record = read_record(folder)
    if record is None or record["settings"] != identity:
        return None
    same_version = record["manifest"]["versions"].get("attnorm") == versions()["attnorm"]
    return record if same_version and record["schema"] == SCHEMA else None


def read_record(folder: Path) -> dict[str, Any] | None:
    """outcome.json of a finished experiment; None where there is none."""
    path = folder / OUTCOME
    if not path.is_file():
        return None
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not {"settings", "manifest", "schema", "findings"} <= record.keys():
            raise ValueError("it lacks entries")
    except (ValueError, AttributeError, OSError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); remove the folder {folder}, or replace it with --fresh"
        ) from None
    return record


def _refuse_other_settings(folder: Path, identity: Mapping[str, Any]) -> None:
    if folder.exists() and not (folder / OUTCOME).is_file():
        raise ValueError(f"{folder} exists and holds no finished experiment; choose another --out, or remove it")
    record = read_record(folder)
    if record is None:
        return
    there = record["settings"]
    different = [name for name in {**there, **identity} if there.get(name) != identity.get(name)]
    if different:
        told = "; ".join(
            f"{name}: {_short(there.get(name))} there, {_short(identity.get(name))} here" for name in different
        )
        raise ValueError(
            f"{folder} holds {record.get('name', 'an experiment')} of other settings ({told}); "
            "choose another --out, or replace it with --fresh"
        )


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_short(one[0] if isinstance(one, list) and one else one) for one in value) or "none"
    text = "none" if value is None else str(value)
    return text if len(text) <= 24 else text[:12] + "..."
