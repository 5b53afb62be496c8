"""The result of analyze(): tables about every head, the manifest, the verdict, and a summary in text or HTML."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from attnorm.analysis import manifest as manifests
from attnorm.analysis import store
from attnorm.analysis.tables import (
    ALL_SCHEMAS,
    HEAD_KEY,
    SCHEMAS,
    TABLES,
    VERDICT_COLUMNS,
    NotMeasuredError,
    merge_runs,
)
from attnorm.analysis.verdicts import ModelVerdict, Thresholds, model_verdict, representative_rows
from attnorm.analysis.verdicts.judge import judge_all
from attnorm.analysis.verdicts.model import threshold_sentences
from attnorm.analysis.verdicts.rows import head_rows
from attnorm.analysis.verdicts.thresholds import checked, thresholds_of
from attnorm.report.page import save as save_page
from attnorm.report.summary import notebook_summary, text_summary
from attnorm.report.top_keys import TopKeys, top_keys
from attnorm.report_data import ReportData
from attnorm.text import did_you_mean


@dataclass(frozen=True)
class Head:
    """One head for one text, length and normalizer: its numbers and its curves."""

    numbers: dict[str, Any]  # its row of `heads`
    by_length: pa.Table
    top_n: pa.Table
    sensitivity: pa.Table
    reads: pa.Table  # heaviest keys of the listed rows


@dataclass(frozen=True, eq=False, repr=False)
class Analysis:
    """The result of a measurement: tables of all heads, the manifest of the run, and the verdicts.

    `heads` has one row per (text, length, normalizer, kind, layer, head). A head is judged over all windows of a text;
    `windows` has the numbers and the verdict of each window.

    >>> analysis = attnorm.analyze("bundled")
    >>> print(analysis.summary())
    >>> analysis.to_pandas().sort_values("entropy_ratio")
    """

    heads: pa.Table
    by_length: pa.Table
    top_n: pa.Table
    sensitivity: pa.Table
    coverage: pa.Table
    reads: pa.Table
    tokens: pa.Table
    blocks: pa.Table
    windows: pa.Table
    manifest: dict[str, Any]

    @classmethod
    def of(cls, tables: Mapping[str, pa.Table], manifest: Mapping[str, Any], thresholds: Thresholds) -> "Analysis":
        """Build an Analysis from measured tables: judge every head by the thresholds."""
        plain = tables["heads"].select(SCHEMAS["heads"].names)
        runs = manifest["model"]["runs"]
        heads, windows = judge_all(
            plain,
            tables["by_length"],
            tables["top_n"],
            thresholds,
            windows=tables["windows"],
            blocks=tables["blocks"],
            model_runs=runs,
        )
        judged = {**tables, "heads": heads, "windows": windows}
        return cls(**judged, manifest={**manifest, "thresholds": thresholds.as_dict()})

    @classmethod
    def merged(cls, analyses: Sequence["Analysis"]) -> "Analysis":
        """Merge runs on the same model with other texts, lengths or normalizers, and judge them again."""
        runs = list(analyses)
        if not runs:
            raise ValueError("expected at least one analysis, got none.")
        reject_other_models([run.manifest["model"] for run in runs])
        try:
            tables = {
                name: merge_runs(name, [run.tables[name].select(schema.names) for run in runs])
                for name, schema in ALL_SCHEMAS.items()
            }
        except NotMeasuredError as error:
            measured = [set(run.manifest["settings"].get("metrics") or ()) for run in runs]
            groups = sorted(set().union(*measured) - set.intersection(*measured))
            if not groups:
                raise
            raise ValueError(
                f"expected the same metric groups in all runs on one text and length, got {', '.join(groups)} in some "
                "only. Measure all of them with the same metrics, or leave one out."
            ) from error
        return Analysis.of(tables, manifests.merge_manifests([run.manifest for run in runs]), runs[0].thresholds)

    @property
    def tables(self) -> dict[str, pa.Table]:
        return {name: getattr(self, name) for name in TABLES}

    @property
    def thresholds(self) -> Thresholds:
        return thresholds_of(self.manifest["thresholds"])

    @cached_property
    def verdict(self) -> ModelVerdict:
        return model_verdict(self.tables, self.manifest, self.thresholds)

    @property
    def report_data(self) -> ReportData:
        """What the report, the terminal and `summary` show."""
        verdict = self.verdict
        return ReportData(
            tables=self.tables,
            manifest=self.manifest,
            headline=verdict.headline,
            counts=verdict.counts,
            sentences=verdict.sentences,
            advice=verdict.advice,
            rows=representative_rows(head_rows(self.heads))[0],
            threshold_sentences=threshold_sentences(self.thresholds, self.manifest),
            default_thresholds=Thresholds().as_dict(),
        )

    def judged(self, thresholds: Thresholds) -> "Analysis":
        """Return the same numbers, judged by other thresholds; the manifest keeps the first as first_thresholds."""
        thresholds = checked(thresholds)
        first = thresholds_of(self.manifest.get("first_thresholds", self.manifest["thresholds"]))
        manifest = {name: value for name, value in self.manifest.items() if name != "first_thresholds"}
        if thresholds != first:
            manifest["first_thresholds"] = first.as_dict()
        return Analysis.of(self.tables, manifest, thresholds)

    def head(
        self,
        layer: int,
        head: int,
        *,
        kind: str | None = None,
        text: str | None = None,
        length: int | None = None,
        normalizer: str | None = None,
    ) -> Head:
        """Return all numbers of one head.

        Options that are None select the first kind, text and normalizer that was measured, and the longest length.
        """
        conditions: dict[str, Any] = {"layer": layer, "head": head}
        filters = {"kind": kind, "text": text, "normalizer": normalizer, "length": length}
        conditions |= {name: value for name, value in filters.items() if value is not None}
        rows = _filter_rows(self.heads, conditions)
        if not rows.num_rows:
            requested = ", ".join(f"{name} {value!r}" for name, value in conditions.items())
            measured = "; ".join(
                f"{name} {_format_some(self.heads[name].unique().to_pylist())}" for name, _ in HEAD_KEY
            )
            raise KeyError(f"expected a head that was measured, got {requested}. Measured heads: {measured}")
        first = rows.slice(0, 1).to_pylist()[0]
        rest = _filter_rows(rows, {name: first[name] for name in ("kind", "text", "normalizer")})
        numbers = max(rest.to_pylist(), key=lambda row: int(row["length"]))
        key = {name: numbers[name] for name, _ in HEAD_KEY}
        tables = (self.by_length, self.top_n, self.sensitivity, self.reads)
        return Head(numbers, *(_filter_rows(table, key) for table in tables))

    def top_keys(self, layer: int, head: int, *, row: int = -1, **choice: Any) -> TopKeys:
        """Return the heaviest keys of one row of a head; `choice` as in `head`.

        row: one of the rows that analyze() stored (`read_rows`), or -1, -2, ... for the last of them.

        >>> print(analysis.top_keys(3, 1))
        """
        return top_keys(self.head(layer, head, **choice).reads, row)

    def plot(self, kind: str = "verdicts", metric: str | None = None, **choice: Any) -> Any:
        """Return a matplotlib Figure; it needs no display.

        kind: "verdicts", "heads" (a metric of every head), "curves" (a metric against n) or "head" (all about one).
        metric: name of the metric (default: entropy_ratio). choice: text, length, normalizer and attention, which is
        the kind of attention; layer and head for one head.

        >>> figure = analysis.plot("heads", "max_weight")
        >>> figure.savefig("heads.png")
        """
        from attnorm.report.plots import plot  # loads matplotlib

        return plot(self.tables, kind, metric, **choice)

    def summary(self) -> str:
        """Return the verdict and its evidence in a few lines of plain text."""
        return text_summary(self.report_data)

    def to_pandas(self, table: str = "heads") -> Any:
        """Return one of the tables as a pandas DataFrame."""
        arrow_table = self._table(table)
        _needs("pandas", "to_pandas")
        return arrow_table.to_pandas()

    def to_polars(self, table: str = "heads") -> Any:
        """Return one of the tables as a polars DataFrame."""
        arrow_table = self._table(table)
        return _needs("polars", "to_polars").from_arrow(arrow_table)

    def to_parquet(self, path: str | Path, table: str = "heads") -> Path:
        """Write one of the tables as a Parquet file, atomically."""
        store.write_table(Path(path), self._table(table))
        return Path(path)

    def save(self, folder: str | Path) -> Path:
        """Write all tables and the manifest for Analysis.load. A folder with another run raises FileExistsError."""
        folder = Path(folder)
        reject_another_run(folder, self.manifest)
        with store.explained_when_full(folder):
            store.make_folder(folder)
            store.write_run(folder, self.tables, self.manifest)
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> "Analysis":
        """Read a finished run that this version of attnorm wrote by analyze(out=...) or save()."""
        folder = Path(folder)
        if not (folder / store.MANIFEST).is_file():
            why = f"{store.MANIFEST} is missing" if folder.is_dir() else "there is no such folder"
            raise FileNotFoundError(f"expected the folder of an analysis, got {folder}: {why}")
        manifest = store.read_json(folder / store.MANIFEST)
        if manifest.get("schema") != manifests.SCHEMA:
            raise ValueError(
                f"{folder}: expected tables of version {manifests.SCHEMA}, got {manifest.get('schema')!r}. "
                f"{manifests.how_to_measure_again(manifest)}"
            )
        if not manifest.get("finished"):
            raise ValueError(
                f"the run in {folder} is not finished ({store.finished_parts(folder)} of {len(manifest['parts'])} "
                "parts). Start the same analysis again with this folder to resume it."
            )
        tables, manifest = store.read_run(folder, manifest)
        for name, schema in ALL_SCHEMAS.items():
            expected = pa.schema([*schema, *VERDICT_COLUMNS]) if name == "heads" else schema
            missing = set(expected.names) - set(tables[name].column_names)
            if missing:
                raise ValueError(
                    f"{folder / name}.parquet: expected the columns of this version of attnorm, got none for "
                    f"{', '.join(sorted(missing))}. {manifests.how_to_measure_again(manifest)}"
                )
        return cls(**tables, manifest=manifest)

    def save_html(self, path: str | Path, *, evaluation: Any = None) -> Path:
        """Write the report: one HTML file that needs no other file and no network.

        evaluation: what attnorm.evaluate returned; its scores become a section of the report.
        """
        return save_page(self.report_data, path, evaluation)

    def __repr__(self) -> str:
        model = self.manifest["model"]["name"]
        return f"<Analysis of {model}: {self.heads.num_rows} rows (head, text, length, normalizer); see .summary()>"

    def _repr_html_(self) -> str:
        return notebook_summary(self.report_data)

    def _table(self, name: str) -> pa.Table:
        if name not in TABLES:
            raise ValueError(f"unknown table {name!r}; {did_you_mean(name, TABLES)}")
        return getattr(self, name)


def reject_another_run(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise FileExistsError, naming the differences, if the folder contains something else than this run."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder}: expected a folder for the output, got a file")
    if not (folder / store.MANIFEST).exists():
        foreign_files = [f"{name}.parquet" for name in TABLES if (folder / f"{name}.parquet").exists()]
        if foreign_files:
            raise FileExistsError(
                f"{folder} contains {', '.join(foreign_files)} of another program. Choose another folder."
            )
        return
    there = store.read_json(folder / store.MANIFEST)
    if "schema" not in there:
        raise FileExistsError(f"{folder} contains a {store.MANIFEST} of another program. Choose another folder.")
    different = manifests.differences(there, manifest)
    if different:
        raise FileExistsError(
            f"{folder} contains another run ({'; '.join(different)}). Choose another folder. "
            "Analysis.merged([...]) combines runs on one model afterwards."
        )


def reject_other_models(models: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if runs measured different models, or one model in different precisions."""
    if len({model["fingerprint"] for model in models}) < 2:
        return
    names = list(dict.fromkeys(repr(model["name"]) for model in models))
    dtypes = list(dict.fromkeys(str(model.get("dtype")) for model in models))
    alike = ("name", "class", "parameters", "layers", "runs")
    if len(dtypes) > 1 and all(model.get(name) == models[0].get(name) for model in models for name in alike):
        expected = f"one dtype, got {', '.join(dtypes)} of {names[0]}. Measure all of them with one dtype"
    else:
        expected = f"runs on one model, got {', '.join(names)}. Merge runs on one model only"
    raise ValueError(f"expected {expected}, or compare them with `attnorm compare`.")


def _filter_rows(table: pa.Table, values: Mapping[str, Any]) -> pa.Table:
    for name, value in values.items():
        if value is not None:
            table = table.filter(pc.equal(table[name], value))
    return table


def _format_some(values: list[Any]) -> str:
    shown = ", ".join(repr(value) for value in values[:12])
    return shown if len(values) <= 12 else f"{shown}, ..."


def _needs(package: str, method: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"Analysis.{method}() needs {package}, which is not installed. Run: pip install {package}. "
            "Without it, use the pyarrow tables, for example analysis.heads, or analysis.to_parquet(path)."
        ) from error
