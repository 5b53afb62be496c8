"""What an analysis gives: tables about every head, the manifest, and a verdict in words."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from attnorm.analysis import manifest as manifests
from attnorm.analysis import store
from attnorm.analysis.merge import NotMeasuredError, merged_table
from attnorm.analysis.tables import HEAD_KEY, SCHEMAS, TABLES, VERDICT_COLUMNS, WINDOWS, complete
from attnorm.analysis.top_keys import TopKeys, top_keys
from attnorm.analysis.upgrade import ADDED, completed_tables, upgraded_manifest
from attnorm.analysis.verdicts import ModelVerdict, Thresholds, model_verdict
from attnorm.analysis.verdicts.judge import judge_all
from attnorm.analysis.verdicts.thresholds import thresholds_of


@dataclass(frozen=True)
class Head:
    """One head of one text, length and normalizer: its row of numbers and its curves."""

    numbers: dict[str, Any]  # the row of `heads`
    by_length: pa.Table
    top_n: pa.Table
    sensitivity: pa.Table
    reads: pa.Table  # of some rows, the heaviest keys


@dataclass(frozen=True, eq=False, repr=False)
class Analysis:
    """One row per (text, length, normalizer, attention kind, layer, head) in `heads`; the curves in the other tables.

    A head is judged over all windows of a text; the numbers and the verdict of each window are in `windows`.

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
        """Measured tables, judged."""
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
        judged = {**complete(tables), "heads": heads, "windows": windows}
        return cls(**judged, manifest={**manifest, "thresholds": thresholds.as_dict()})

    @classmethod
    def merged(cls, analyses: Sequence["Analysis"]) -> "Analysis":
        """Several runs on the same model as one: other texts, lengths or normalizers. Verdicts are made again."""
        runs = list(analyses)
        if not runs:
            raise ValueError("nothing to merge: the list of analyses is empty")
        refuse_other_models([run.manifest["model"] for run in runs])
        try:
            tables = {
                name: merged_table(name, [run.tables[name].select(schema.names) for run in runs])
                for name, schema in {**SCHEMAS, "windows": WINDOWS}.items()
            }
        except NotMeasuredError as error:
            groups = _measured_by_some(runs)
            if not groups:
                raise
            raise ValueError(
                f"one run did not measure the group{'s' * (len(groups) > 1)} {', '.join(groups)}, on a text and length "
                "that another did; measure it again with the same metrics, or leave it out"
            ) from error
        return Analysis.of(tables, manifests.merged([run.manifest for run in runs]), runs[0].thresholds)

    @property
    def tables(self) -> dict[str, pa.Table]:
        return {name: getattr(self, name) for name in TABLES}

    @property
    def thresholds(self) -> Thresholds:
        return thresholds_of(self.manifest["thresholds"])

    @cached_property
    def verdict(self) -> ModelVerdict:
        return model_verdict(self.tables, self.manifest, self.thresholds)

    def judged(self, thresholds: Thresholds) -> "Analysis":
        """The same numbers under other thresholds; nothing is measured again. The manifest keeps the first ones."""
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
        """One head; what is left open is the first that was measured, and the longest length."""
        wanted: dict[str, Any] = {"layer": layer, "head": head}
        given = {"kind": kind, "text": text, "normalizer": normalizer, "length": length}
        wanted |= {name: value for name, value in given.items() if value is not None}
        rows = _where(self.heads, wanted)
        if not rows.num_rows:
            asked = ", ".join(f"{name} {value!r}" for name, value in wanted.items())
            known = "; ".join(f"{name} {_some(self.heads[name].unique().to_pylist())}" for name, _ in HEAD_KEY)
            raise KeyError(f"no head with {asked} was measured; there are: {known}")
        first = rows.slice(0, 1).to_pylist()[0]
        rest = _where(rows, {name: first[name] for name in ("kind", "text", "normalizer")})
        numbers = max(rest.to_pylist(), key=lambda row: int(row["length"]))
        key = {name: numbers[name] for name, _ in HEAD_KEY}
        tables = (self.by_length, self.top_n, self.sensitivity, self.reads)
        return Head(numbers, *(_where(table, key) for table in tables))

    def top_keys(self, layer: int, head: int, *, row: int = -1, **choice: Any) -> TopKeys:
        """The keys that a head reads from one row, the heaviest first; `choice` as in `head`.

        row: a position that was chosen when the run was measured (`read_rows`), or -1, -2, ... for the last of them.

        >>> print(analysis.top_keys(3, 1))
        """
        return top_keys(self.head(layer, head, **choice).reads, row)

    def plot(self, kind: str = "verdicts", metric: str | None = None, **choice: Any) -> Any:
        """A matplotlib Figure: "verdicts", "heads" (a metric of every head), "curves" (a metric against n) or "head".

        metric: a name of the catalogue (default: entropy_ratio). choice: text, length, normalizer and attention kind
        as `attention`; layer and head for one head. Needs no display; a notebook shows the figure.

        >>> figure = analysis.plot("heads", "max_weight")
        >>> figure.savefig("heads.png")
        """
        plots = importlib.import_module("attnorm.report.plots")  # by name: no import points upwards
        return plots.plot(self, kind, metric, **choice)

    def summary(self) -> str:
        """The verdict and what it rests on, in a few lines of plain text."""
        from attnorm.analysis.summary import summary

        return summary(self)

    def to_pandas(self, table: str = "heads") -> Any:
        """One of the tables as a pandas DataFrame."""
        chosen = self._table(table)
        _needs("pandas", "to_pandas")
        return chosen.to_pandas()

    def to_polars(self, table: str = "heads") -> Any:
        """One of the tables as a polars DataFrame."""
        chosen = self._table(table)
        return _needs("polars", "to_polars").from_arrow(chosen)

    def to_parquet(self, path: str | Path, table: str = "heads") -> Path:
        """One of the tables as a Parquet file, written whole or not at all."""
        store.write_table(Path(path), self._table(table))
        return Path(path)

    def save(self, folder: str | Path) -> Path:
        """All tables and the manifest, for Analysis.load. A folder that holds another run is left as it is."""
        folder = Path(folder)
        refuse_another_run(folder, self.manifest)
        with store.explained_when_full(folder):
            store.write_run(folder, self.tables, self.manifest)
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> "Analysis":
        folder = Path(folder)
        if not (folder / store.MANIFEST).is_file():
            raise FileNotFoundError(f"{folder} holds no analysis: there is no {store.MANIFEST} in it")
        manifest = store.read_json(folder / store.MANIFEST)
        if manifest.get("schema") not in manifests.READABLE:
            raise ValueError(
                f"{folder} has tables of version {manifest.get('schema')!r}, this attnorm reads "
                f"{' and '.join(map(str, manifests.READABLE))}; measure again, or load it with the version "
                "that wrote it"
            )
        if not manifest.get("finished"):
            raise ValueError(
                f"the run in {folder} is not finished ({store.finished_parts(folder)} of {len(manifest['parts'])} "
                "parts); start the same analysis again with this folder, it goes on where it stopped"
            )
        old = manifest["schema"] != manifests.SCHEMA
        written = [name for name in TABLES if not (old and name in ADDED)]
        tables, manifest = store.read_run(folder, manifest, written)
        if old:
            return cls.of(completed_tables(tables), upgraded_manifest(manifest), thresholds_of(manifest["thresholds"]))
        tables = complete(tables)
        for name, schema in {**SCHEMAS, "windows": WINDOWS}.items():
            expected = pa.schema([*schema, *VERDICT_COLUMNS]) if name == "heads" else schema
            missing = set(expected.names) - set(tables[name].column_names)
            if missing:
                raise ValueError(f"{folder / name}.parquet lacks the columns {', '.join(sorted(missing))}")
        return cls(**tables, manifest=manifest)

    def save_html(self, path: str | Path) -> Path:
        """The report: one HTML file that needs nothing else."""
        # The report is a room above this one; only by name, so that no import points upwards.
        page = importlib.import_module("attnorm.report.html.page")
        saved: Path = page.save(self, Path(path))
        return saved

    def __repr__(self) -> str:
        model = self.manifest["model"]["name"]
        return f"<Analysis of {model}: {self.heads.num_rows} rows (head, text, length, normalizer); see .summary()>"

    def _repr_html_(self) -> str:
        from attnorm.analysis.summary import notebook

        return notebook(self)

    def _table(self, name: str) -> pa.Table:
        if name not in TABLES:
            raise ValueError(f"unknown table {name!r}; expected one of {', '.join(map(repr, TABLES))}")
        return getattr(self, name)


def refuse_another_run(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raises if the folder holds anything but this very run, naming what differs; touches nothing."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; the output of an analysis is a folder")
    if not (folder / store.MANIFEST).exists():
        taken = [f"{name}.parquet" for name in TABLES if (folder / f"{name}.parquet").exists()]
        if taken:
            raise FileExistsError(f"{folder} holds {', '.join(taken)} of something else; choose another folder")
        return
    different = manifests.differences(store.read_json(folder / store.MANIFEST), manifest)
    if different:
        raise FileExistsError(
            f"{folder} holds another run ({'; '.join(different)}); choose another folder. "
            "Runs on one model can be put together afterwards: Analysis.merged([...])"
        )


def refuse_other_models(models: Sequence[Mapping[str, Any]]) -> None:
    """Raises where runs are not about one model, or about one in different precisions."""
    if len({model["fingerprint"] for model in models}) < 2:
        return
    names = list(dict.fromkeys(repr(model["name"]) for model in models))
    dtypes = list(dict.fromkeys(str(model.get("dtype")) for model in models))
    alike = ("name", "class", "parameters", "layers", "runs")
    if len(dtypes) > 1 and all(model.get(name) == models[0].get(name) for model in models for name in alike):
        found = f"these runs measured {names[0]} in different precisions ({', '.join(dtypes)})"
        way = "measure all of them with one dtype"
    else:
        found = f"these runs measured different models ({', '.join(names)})"
        way = "merge runs of one model only"
    raise ValueError(
        f"{found}, whose heads cannot share one table; {way}, or put them side by side with `attnorm compare`"
    )


def _measured_by_some(runs: Sequence[Analysis]) -> list[str]:
    """The groups of metrics that not all of the runs have."""
    groups = [set(run.manifest["settings"].get("metrics") or ()) for run in runs]
    return sorted(set().union(*groups) - set.intersection(*groups))


def _where(table: pa.Table, values: Mapping[str, Any]) -> pa.Table:
    import pyarrow.compute as pc

    for name, value in values.items():
        if value is not None:
            table = table.filter(pc.equal(table[name], value))
    return table


def _some(values: list[Any]) -> str:
    shown = ", ".join(repr(value) for value in values[:12])
    return shown if len(values) <= 12 else f"{shown}, ..."


def _needs(package: str, method: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"Analysis.{method}() needs {package}, which is not installed. Run: pip install {package}; "
            "without it the tables are there as pyarrow, e.g. analysis.heads, and as files, analysis.to_parquet(path)"
        ) from error
