"""Run experiments and write their results; finished experiments are not run again.

OUT/index.html          figures and verdicts of all experiments in the folder
OUT/NAME/               one finished experiment, complete or absent:
    verdict.md          the summary and the findings
    outcome.json        findings, parameters, and the manifest: model, texts, versions
    *.svg *.png *.pdf   figures              *.csv *.parquet   tables
OUT/parts/NAME-KEY/     intermediate results from which an interrupted experiment resumes; some are removed at the end
"""

import contextlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from attnorm.figures import save, style
from attnorm.files import atomic_replace, finite, remove_abandoned, write_text
from attnorm.provenance import now, settings_hash, versions
from attnorm.run_folder import make_writable, read_record, require_folder, require_same_run
from attnorm.text import markdown_table, render_page
from attnorm_lab.experiments.catalogue import EXPERIMENTS, check_text_lengths, check_unused_options, named
from attnorm_lab.experiments.experiment import (
    Experiment,
    ExperimentSubject,
    Outcome,
    ProgressCallback,
    no_progress,
    paper_setting,
)

OUTCOME = "outcome.json"
VERDICT = "verdict.md"
FIGURE_FILES, TABLE_FILES = (".svg", ".png", ".pdf"), (".csv", ".parquet")
PARTS = "parts"
INDEX = "index.html"
# verdict -> its CSS class
MARKS = {"reproduces": "yes", "partly": "half", "does not": "no", "not decided": "open", "not tested": "open"}
SCHEMA = 1


@dataclass(frozen=True)
class Written:
    """A finished experiment on disk."""

    name: str
    folder: Path
    record: Mapping[str, Any]  # outcome.json
    found: bool  # it was finished before this call

    @property
    def findings(self) -> list[dict[str, str]]:
        return list(self.record["findings"])


def reproduce(
    names: Iterable[str],
    subject: ExperimentSubject,
    out: Path,
    *,
    fresh: bool = False,
    progress: ProgressCallback = no_progress,
    command: str = "",
) -> list[Written]:
    """Run experiments by name and write them to the folder, with an index page of all experiments in it.

    fresh: rerun finished experiments from scratch.

    Raises:
        ValueError: Unknown experiment, an option that it does not use, a text that is too short, or a folder with
            results of other settings.
    """
    experiments = named(names)
    check_unused_options(experiments, subject)
    require_folder(out)
    check_text_lengths(experiments, subject)
    identities = [_settings_of_run(experiment, subject) for experiment in experiments]
    for experiment, identity in zip(experiments, identities, strict=True):
        if not fresh:
            _require_same_settings(out / experiment.name, identity)
        if fresh or _find_finished(out / experiment.name, identity) is None:
            _require_own_files(out / experiment.name)
    make_writable(out)  # before an experiment takes its time
    remove_abandoned(out)
    written = []
    for number, (experiment, identity) in enumerate(zip(experiments, identities, strict=True), 1):

        def named_progress(what: str, done: int, total: int, name: str = experiment.name) -> None:
            progress(f"{name}: {what}" if what else name, done, total)

        progress(f"{experiment.name} ({number} of {len(experiments)})", 0, 1)
        written.append(_run_experiment(experiment, subject, identity, out, fresh, named_progress, command))
        write_index(out)
    return written


def _run_experiment(
    experiment: Experiment,
    subject: ExperimentSubject,
    identity: dict[str, Any],
    out: Path,
    fresh: bool,
    progress: ProgressCallback,
    command: str,
) -> Written:
    """Return the finished experiment from disk, or run it and write its results."""
    folder = out / experiment.name
    if not fresh and (record := _find_finished(folder, identity)):
        progress("found finished", 1, 1)
        return Written(experiment.name, folder, record, found=True)
    parts = out / PARTS / f"{experiment.name}-{_parts_key(identity)}"
    if fresh:
        shutil.rmtree(parts, ignore_errors=True)
    started = time.perf_counter()
    with style():
        outcome = experiment.run(subject, progress, parts)
        manifest = {
            "created": now(),
            "seconds": round(time.perf_counter() - started, 1),
            "command": command,
            "versions": versions(),
            **_describe_models(experiment, subject),
        }
        record = _make_record(experiment, outcome, identity, manifest)
        _write(folder, outcome, record)
    if experiment.removes_parts:
        _clear(parts)
    return Written(experiment.name, folder, record, found=False)


def _clear(parts: Path) -> None:
    shutil.rmtree(parts, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty: other experiments keep theirs there
        parts.parent.rmdir()


def _settings_of_run(experiment: Experiment, subject: ExperimentSubject) -> dict[str, Any]:
    settings = {"experiment": experiment.name, **subject.identity(with_model=experiment.needs_model)}
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def _parts_key(identity: Mapping[str, Any]) -> str:
    """Name the intermediate results; they do not depend on `only`, which selects some of them."""
    decisive = {name: value for name, value in identity.items() if name != "only"}
    return settings_hash(decisive)[:12]


def _describe_models(experiment: Experiment, subject: ExperimentSubject) -> dict[str, Any]:
    """Return the manifest's entries about the model or models, and whether this is the paper's setting."""
    if not experiment.needs_model:
        return {}
    models = [model_subject.described() for model_subject in subject.each()]
    text = subject.passages()[0]
    same = paper_setting(experiment.name, models[0], text.name, text.content, quick=subject.quick)
    return {"model": models[0], **({"others": models[1:]} if models[1:] else {}), **same}


def _make_record(
    experiment: Experiment, outcome: Outcome, identity: dict[str, Any], manifest: dict[str, Any]
) -> dict[str, Any]:
    record: dict[str, Any] = finite(
        {
            "schema": SCHEMA,
            "name": experiment.name,
            "title": experiment.title,
            "source": experiment.source,
            "question": experiment.question,
            "words": outcome.summary,
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
    with atomic_replace(folder) as draft:
        draft.mkdir(parents=True)
        for name, figure in outcome.figures.items():
            save(figure, draft / name)
        for name, table in outcome.tables.items():
            pa.csv.write_csv(table, draft / f"{name}.csv")
            pa.parquet.write_table(table, draft / f"{name}.parquet", compression="zstd")
        (draft / VERDICT).write_text(_verdict_page(record), encoding="utf-8")
        text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False, default=_to_json)
        (draft / OUTCOME).write_text(text + "\n", encoding="utf-8")


def _to_json(value: Any) -> Any:
    """Convert paths and numbers of NumPy and torch, which experiments use as parameters."""
    if isinstance(value, Path):
        return value.name
    if hasattr(value, "tolist"):
        return finite(value.tolist())
    raise TypeError(
        f"parameters: expected plain values (numbers, text, lists, dicts), got {value!r} of type "
        f"{type(value).__name__}."
    )


def _verdict_page(record: Mapping[str, Any]) -> str:
    """Return Markdown: the summary, then one row per claim."""
    lines = [f"# {record['title']}", "", f"{record['source']}. {record['question']}", "", record["words"], ""]
    if same := record["manifest"].get("paper_setting"):
        lines += [same["sentence"], ""]
    header = ("claim", "ours", "verdict", "why")
    findings = markdown_table(header, ([finding[name] for name in header] for finding in record["findings"]), left=4)
    return "\n".join([*lines, findings]).rstrip("\n") + "\n"


def _find_finished(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of a finished run with these settings and this version of attnorm, or None."""
    record = read_outcome(folder)
    if record is None or record["settings"] != identity:
        return None
    same_version = record["manifest"]["versions"].get("attnorm") == versions()["attnorm"]
    return record if same_version and record["schema"] == SCHEMA else None


def read_outcome(folder: Path) -> dict[str, Any] | None:
    """Read outcome.json of a finished experiment; None if there is none."""
    remedy = f"Remove the folder {folder}, or replace it with --fresh."
    return read_record(folder / OUTCOME, ("settings", "manifest", "schema", "findings"), remedy)


def _require_same_settings(folder: Path, identity: Mapping[str, Any]) -> None:
    if folder.exists() and not (folder / OUTCOME).is_file():
        raise ValueError(
            f"expected a new folder or one with a finished experiment, got {folder}. Choose another --out, or remove "
            "it."
        )
    record = read_outcome(folder)
    if record is not None:
        message = f"{folder} contains {record.get('name', 'an experiment')} of other settings"
        remedy = "Choose another --out, or replace it with --fresh"
        require_same_run(identity, record["settings"], message, remedy, _shorten)


def _require_own_files(folder: Path) -> None:
    """Raise ValueError if the folder, which new results replace, contains files that no experiment wrote."""
    if not folder.exists():
        return
    try:
        record = read_outcome(folder) or {}
        names = [f"{name}{suffix}" for name in record.get("figures", ()) for suffix in FIGURE_FILES]
        names += [f"{name}{suffix}" for name in record.get("tables", ()) for suffix in TABLE_FILES]
    except ValueError:  # damaged: it does not name its files
        names = [path.name for path in folder.iterdir() if path.suffix in (*FIGURE_FILES, *TABLE_FILES)]
    foreign = sorted({path.name for path in folder.iterdir()} - {OUTCOME, VERDICT, *names})
    if foreign:
        raise ValueError(
            f"{folder} contains {', '.join(foreign[:3])}{' and others' if len(foreign) > 3 else ''}, which new "
            "results would delete. Choose another --out, or move them."
        )


def _shorten(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_shorten(item[0] if isinstance(item, list) and item else item) for item in value) or "none"
    text = "none" if value is None else str(value)
    return text if len(text) <= 24 else text[:12] + "..."


def write_index(out: Path) -> None:
    """Write one HTML page, without scripts, of all finished experiments in the folder, in the catalogue's order."""
    records = []
    for name in EXPERIMENTS:
        with contextlib.suppress(ValueError):  # damaged: the page shows the others
            records.append(read_outcome(out / name))
    write_text(out / INDEX, render_index([record for record in records if record is not None]))


def render_index(records: list[dict[str, Any]]) -> str:
    counts = Counter(finding["verdict"] for record in records for finding in record["findings"])
    here = Path(__file__).parent
    return render_page(
        here / "index.html.j2",
        style=(here / "index.css").read_text(encoding="utf-8"),
        images="'self' file:",
        records=records,
        counts=counts,
        total=counts.total(),
        marks=MARKS,
    )
