"""`attnorm lab reproduce vision`: small vision transformers of 64 to 1,024 tokens per image, softmax against SOFT.

Lu et al. 2021 (https://arxiv.org/abs/2110.11945) replace softmax by a Gaussian kernel, approximate it through landmarks
at linear cost, and find more accuracy than softmax at equal size on ImageNet. Here: models of equal shape and budget on
CIFAR-10, or on generated textures with --quick. Every finished model is one JSON line, so a run resumes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from attnorm.arithmetic import SIGNIFICANT, Difference, student_interval, wilson_interval
from attnorm.figures import INK, PALE, note, panel
from attnorm.files import append_jsonl, read_jsonl
from attnorm.provenance import file_hash
from attnorm.run_folder import lock, try_lock
from attnorm_lab.experiments.experiment import (
    RECORDS,
    Experiment,
    ExperimentFinding,
    ExperimentSubject,
    Outcome,
    ProgressCallback,
    Verdict,
    compare_over_seeds,
    copied_records,
    judge,
    without_verdicts,
)
from attnorm_lab.training.device import chosen_device, free_memory, machine
from attnorm_lab.training.vision.data import ImageSplits, generated_textures, read_archive
from attnorm_lab.training.vision.model import VisionSettings
from attnorm_lab.training.vision.train import Record, train_vit

RESULTS = "results.jsonl"  # in the folder of intermediate results: records of this one
GENERATED = "generated textures"
RECORDED = ("settings", "tokens", "correct", "tested_on", "images_per_second", "peak_bytes", "parameters")
MIN_SEEDS = 3  # for a verdict


@dataclass(frozen=True)
class VisionModel:
    """A model of the comparison by its name in tables and figures."""

    name: str
    settings: Mapping[str, Any]  # of VisionSettings, where they differ from the plan's
    patches: tuple[int, ...] = (4, 2, 1)  # for which it is trained


SOFT = {"normalizer": "soft", "squares": 7}  # 49 landmarks, as in the paper, and the class token
SOFT_PLUS_PLUS = {"normalizer": "soft:normalised=true", "squares": 7}
# Three stages, and landmarks by a learned convolution over the image: the form of SOFT's own models.
PYRAMID = {"architecture": "pyramid", "heads": 4}
CONVOLUTION = {"landmarks": "convolution", "landmark_side": 4, "shared_keys": True}
MODELS = (
    VisionModel("softmax", {"normalizer": "softmax"}),
    VisionModel("gaussian", {"normalizer": "gaussian"}),
    VisionModel("soft", SOFT),
    VisionModel("soft++", SOFT_PLUS_PLUS),
    VisionModel("linear", {"normalizer": "linear"}),
    VisionModel("sigmoid", {"normalizer": "sigmoid"}),
    VisionModel("entmax15", {"normalizer": "entmax15"}),
    VisionModel("soft K=Q", SOFT | {"shared_keys": True}, (4,)),
    VisionModel("soft++ K=Q", SOFT_PLUS_PLUS | {"shared_keys": True}, (4,)),
    VisionModel("pyramid softmax", PYRAMID | {"normalizer": "softmax"}, (2,)),
    VisionModel("pyramid soft", PYRAMID | CONVOLUTION | {"normalizer": "soft"}, (2,)),
    VisionModel("pyramid soft++", PYRAMID | CONVOLUTION | {"normalizer": "soft:normalised=true"}, (2,)),
)


@dataclass(frozen=True, kw_only=True)
class VisionPlan:
    """Epochs belong to a patch: within a patch all models see equally many images."""

    models: tuple[VisionModel, ...] = MODELS
    epochs: tuple[tuple[int, int], ...] = ((4, 30), (2, 15), (1, 5))  # patch, epochs
    seeds: tuple[int, ...] = (0, 1, 2)
    settings: VisionSettings

    def trained(self, first_seed: int, only: Sequence[str]) -> list[tuple[VisionModel, VisionSettings]]:
        """Return every model to train, the cheapest patches first.

        Raises:
            ValueError: `only` has a name that is not in the plan.
        """
        names = [model.name for model in self.models]
        for name in only:
            if name not in names:
                raise ValueError(f"expected --only with names of {', '.join(names)}, got {name!r}.")
        return [
            (model, replace(self.settings, **model.settings, patch=patch, epochs=epochs, seed=first_seed + seed))
            for patch, epochs in self.epochs
            for seed in self.seeds
            for model in self.models
            if patch in model.patches and (not only or model.name in only)
        ]


FULL = VisionPlan(settings=VisionSettings(dtype="bfloat16"))
QUICK = VisionPlan(
    models=(
        VisionModel("softmax", {"normalizer": "softmax"}, (8, 4)),
        VisionModel("soft", {"normalizer": "soft", "squares": 2}, (8, 4)),
        VisionModel("linear", {"normalizer": "linear"}, (8,)),
        VisionModel(
            "pyramid soft", PYRAMID | CONVOLUTION | {"normalizer": "soft", "landmark_side": 2, "layers": 3}, (4,)
        ),
    ),
    epochs=((8, 1), (4, 1)),
    seeds=(0,),
    settings=VisionSettings(layers=1, heads=2, width=16, batch=32, learning_rate=1e-2),
)
QUICK_IMAGES = {"train": 128, "test": 64, "side": 16}


def run(subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> Outcome:
    plan = QUICK if subject.quick else FULL
    records = records_of(plan, subject, progress, parts)
    planned = len(plan.trained(subject.seed, subject.only))
    made = outcome(records, plan, planned=planned)
    return without_verdicts(made) if subject.quick else made


def records_of(plan: VisionPlan, subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> list[Record]:
    """Return the record of every model of the plan; train those without one, which no other process is training.

    Without images nothing is trained, and the records of the folder are all there is.

    Raises:
        ValueError: Neither images nor records of one archive, or --only names no model of the plan.
    """
    device = chosen_device(subject.device)
    if device.type != "cuda":
        plan = replace(plan, settings=replace(plan.settings, dtype="float32"))
    planned = plan.trained(subject.seed, subject.only)
    only_draws = subject.images is None and not subject.quick
    finished = _finished_records(parts, of_all_images=only_draws)
    source = image_source(subject, finished.values(), parts.parent.parent)
    missing = [(model, settings) for model, settings in planned if _key(settings.as_dict(), source) not in finished]
    if only_draws:
        missing = []
    if missing:  # before the folder is made: the archive may be damaged
        progress("reading images", 0, len(missing))
        images = read_images(subject)
    for done, (model, settings) in enumerate(missing):
        label = f"{model.name}, patch {settings.patch}, seed {settings.seed}"
        with try_lock(parts / "locks" / f"{label}.lock") as mine:
            if not mine or _key(settings.as_dict(), source) in _finished_records(parts):  # another process trains it
                continue
            progress(f"training {label}", done, len(missing))
            _, trained = train_vit(settings, images, device, compiled=device.type == "cuda")
            record = {"model": model.name, "images": source, **trained, **machine(device)}
            with lock(parts / "locks" / "records.lock"):
                append_jsonl(parts / RESULTS, [record])
            torch.compiler.reset()  # or torch stops compiling after eight models
            free_memory()
    finished = _finished_records(parts, of_all_images=only_draws)
    keys = [(model, _key(settings.as_dict(), source)) for model, settings in planned]
    return [finished[key] | {"model": model.name} for model, key in keys if key in finished]


def _finished_records(parts: Path, *, of_all_images: bool = False) -> dict[str, Record]:
    """Return the records by their key. of_all_images: those that runs with any --images left in the folder too."""
    files = [*copied_records(parts), parts / RESULTS]
    if of_all_images:
        files += sorted(parts.parent.glob(f"vision-*/{RESULTS}"))
    records = {}
    for file in files:
        for record in read_jsonl(file):
            if "images" in record:  # other experiments keep records under the same name
                if lacking := [name for name in RECORDED if name not in record]:
                    raise ValueError(
                        f"{file}: expected records of attnorm lab reproduce vision, got one without {lacking[0]!r}. "
                        "Remove the file, or copy it again."
                    )
                records[_key(record["settings"], record["images"])] = record
    return records


def image_source(subject: ExperimentSubject, finished: Iterable[Record], out: Path) -> str:
    """Return what identifies the images in a record: of the subject, or else of the finished records.

    Raises:
        ValueError: The subject has no images, and the records are of none or of several archives.
    """
    if subject.images is not None:
        return f"{subject.images.name} {file_hash(subject.images)[:16]}"
    if subject.quick:
        return GENERATED
    sources = sorted({record["images"] for record in finished} - {GENERATED})
    if len(sources) == 1:
        return str(sources[0])
    raise ValueError(
        f"vision: expected images, or records of one archive in {out}, got records of "
        f"{' and of '.join(sources) or 'none'}. To train, give --images FILE, a .tar archive with train/CLASS/*.jpg "
        f"and test/CLASS/*.jpg, or use --quick, which generates images. To draw records, copy them to {out / RECORDS} "
        "(or .xz)."
    )


def read_images(subject: ExperimentSubject) -> ImageSplits:
    return generated_textures(**QUICK_IMAGES) if subject.images is None else read_archive(subject.images)


def _key(settings: dict[str, Any], images: str) -> str:
    """Identify a record by its settings and images; the dtype is the machine's: records of a GPU are drawn on any."""
    return f"{sorted((name, value) for name, value in settings.items() if name != 'dtype')} {images}"


@dataclass(frozen=True)
class Accuracy:
    """Mean over seeds, and a 95 % interval: Student's t over seeds, or Wilson's for the images of a single model."""

    mean: float
    low: float
    high: float
    seeds: int


def accuracy(records: Sequence[Record]) -> Accuracy:
    """Return the accuracy over the models whose training did not fail."""
    shares = [record["correct"] / record["tested_on"] for record in records if record["correct"] is not None]
    if not shares:
        return Accuracy(math.nan, math.nan, math.nan, 0)
    if len(shares) == 1:
        return Accuracy(shares[0], *wilson_interval(shares[0], records[0]["tested_on"]), 1)
    low, high = student_interval(shares)
    return Accuracy(fmean(shares), max(0.0, low), min(1.0, high), len(shares))


def groups_of(records: Sequence[Record]) -> dict[tuple[int, str], list[Record]]:
    """Return the records by tokens per image and model."""
    groups: dict[tuple[int, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["tokens"], record["model"]), []).append(record)
    return groups


def outcome(records: Sequence[Record], plan: VisionPlan, *, planned: int) -> Outcome:
    """Return figure, table and findings of the records. planned: how many models the plan has."""
    missing = planned - len(records)
    return Outcome(
        summary=summary(records) + f" {missing} of the {planned} models of the plan have no record." * (missing > 0),
        findings=findings(records),
        figures={"vision": figure(records)},
        tables={"models": table(records)},
        parameters=asdict(plan),
    )


@dataclass(frozen=True)
class SeedComparison:
    """A model against its rival at one number of tokens."""

    seeds: int  # common ones
    difference: Difference | None
    p_holm: float | None
    tests: int  # that the correction counts


def comparisons_of(records: Sequence[Record]) -> dict[tuple[int, str, str], SeedComparison]:
    """Compare, by tokens, model and rival: each model with the softmax of its form, and `soft` with the full kernel.

    Holm's correction is over all comparisons with softmax, and apart from these over all with the kernel.
    """
    groups = groups_of(records)
    with_softmax = [
        (tokens, name, "pyramid softmax" if name.startswith("pyramid ") else "softmax")
        for tokens, name in groups
        if not name.endswith("softmax")
    ]
    with_kernel = [(tokens, "soft", "gaussian") for tokens, name in groups if name == "soft"]
    compared: dict[tuple[int, str, str], SeedComparison] = {}
    for family in (with_softmax, with_kernel):
        sides = {
            (tokens, name, rival): (_by_seed(groups[tokens, name]), _by_seed(groups[tokens, rival]))
            for tokens, name, rival in family
            if (tokens, rival) in groups
        }
        tests = compare_over_seeds(sides)
        for key, (ours, theirs) in sides.items():
            test, p_holm = tests.get(key, (None, None))
            compared[key] = SeedComparison(len(ours.keys() & theirs.keys()), test, p_holm, len(tests))
    return compared


def _by_seed(records: Sequence[Record]) -> dict[int, float]:
    """Return the share of right answers by seed, of the models whose training did not fail."""
    return {
        record["settings"]["seed"]: record["correct"] / record["tested_on"]
        for record in records
        if record["correct"] is not None
    }


def table(records: Sequence[Record]) -> pa.Table:
    """One row per tokens and model, over seeds, with the difference to softmax."""
    with_softmax = {
        (tokens, model): compared
        for (tokens, model, rival), compared in comparisons_of(records).items()
        if rival != "gaussian"
    }
    rows = []
    for (tokens, model), group in groups_of(records).items():
        over_seeds, compared = accuracy(group), with_softmax.get((tokens, model))
        test = compared and compared.difference
        rows.append(
            {
                "tokens": tokens, "model": model, "seeds": len(group), "failed": len(group) - over_seeds.seeds,
                "accuracy": over_seeds.mean, "low": over_seeds.low, "high": over_seeds.high,
                "difference": test and test.value, "difference_low": test and test.low,
                "difference_high": test and test.high, "p": test and test.p, "p_holm": compared and compared.p_holm,
                "images_per_second": fmean(record["images_per_second"] for record in group),
                "peak_mb": max(record["peak_bytes"] or math.nan for record in group) / 1e6,
                "parameters": group[0]["parameters"],
            }
        )  # fmt: skip
    return pa.Table.from_pylist(rows)


def findings(records: Sequence[Record]) -> tuple[ExperimentFinding, ...]:
    """Compare each SOFT model with softmax, and the landmarks with the full kernel, at every number of tokens."""
    groups, compared = groups_of(records), comparisons_of(records)
    comparisons = []
    for tokens in dict.fromkeys(tokens for tokens, _ in groups):
        for name, rival, claim in (
            ("soft", "softmax", "SOFT is more accurate than softmax at equal size"),
            ("soft++", "softmax", "SOFT++ is more accurate than softmax at equal size"),
            ("soft K=Q", "softmax", "SOFT with K = Q is more accurate than softmax"),
            ("soft++ K=Q", "softmax", "SOFT++ with K = Q is more accurate than softmax"),
            ("pyramid soft", "pyramid softmax", "in a pyramid SOFT is more accurate than softmax"),
            ("pyramid soft++", "pyramid softmax", "in a pyramid SOFT++ is more accurate than softmax"),
            ("soft", "gaussian", "the landmarks are at least as accurate as the full Gaussian kernel"),
        ):
            if (tokens, name, rival) in compared:
                verdict, words, why = _judge(compared[tokens, name, rival])
                comparisons.append(
                    ExperimentFinding(
                        claim=f"{claim} ({tokens:,} tokens)",
                        ours=f"{name} {_in_words(accuracy(groups[tokens, name]))}, "
                        f"{rival} {_in_words(accuracy(groups[tokens, rival]))}{words}",
                        verdict=verdict,
                        why=why,
                    )
                )
    return tuple(comparisons)


def _judge(compared: SeedComparison) -> tuple[Verdict, str, str]:
    """Return verdict, difference and reason. Two seeds carry no claim: their differences may be equal by chance."""
    test, p_holm = compared.difference, compared.p_holm
    if compared.seeds < MIN_SEEDS or test is None or p_holm is None:
        return "not tested", "", f"{compared.seeds} of the {MIN_SEEDS} seeds that a verdict needs"
    words = f"; difference {100 * test.value:+.1f} points ({100 * test.low:+.1f} to {100 * test.high:+.1f})"
    why = f"p = {p_holm:.2g} after Holm's correction over {compared.tests} tests"
    if p_holm >= SIGNIFICANT:
        return "not decided", words, why
    return judge(test.value > 0), words, why


def _in_words(over_seeds: Accuracy) -> str:
    if not over_seeds.seeds:
        return "failed"
    mean, low, high, seeds = over_seeds.mean, over_seeds.low, over_seeds.high, over_seeds.seeds
    return f"{mean:.1%} ({low:.1%} to {high:.1%}, {seeds} seed{'s' * (seeds > 1)})"


def summary(records: Sequence[Record]) -> str:
    groups = groups_of(records)
    sentences = []
    for tokens in dict.fromkeys(tokens for tokens, _ in groups):
        means = {model: accuracy(group).mean for (count, model), group in groups.items() if count == tokens}
        listed = ", ".join(
            f"{model} {'failed' if math.isnan(mean) else f'{mean:.1%}'}" for model, mean in means.items()
        )
        sentences.append(f"{tokens:,} tokens: {listed}.")
    return "Accuracy on the test images. " + " ".join(sentences)


def figure(records: Sequence[Record]) -> Figure:
    """Accuracy, training speed and memory of each model against the tokens per image."""
    groups = groups_of(records)
    models = list(dict.fromkeys(model for _, model in groups))
    drawn = Figure(figsize=(10.5, 1.6 + 0.3 * len(models)))
    panels = drawn.subplots(1, 3, sharey=True)
    for index, (axes, title) in enumerate(
        zip(panels, ("accuracy, %", "training, images per second", "peak memory, GB"), strict=True)
    ):
        panel(axes, "abc"[index], title)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        _draw(axes, groups, models, index)
    panels[0].set_yticks(range(len(models)), models)
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="lower right", ncols=len(labels), fontsize=8)
    note(
        drawn,
        "(a) 95 % intervals, with an arrow where one leaves the panel; (b), (c) from the lowest to the highest seed. "
        "attnorm lab reproduce vision",
    )
    drawn.tight_layout(rect=(0, 0.06, 1, 1))
    return drawn


def _draw(axes: Axes, groups: dict[tuple[int, str], list[Record]], models: Sequence[str], panel: int) -> None:
    sizes = sorted({tokens for tokens, _ in groups})
    shown: list[float] = []  # every seed
    intervals: list[tuple[float, float, float, str]] = []  # left end, right end, height, color
    for tokens, color, marker in zip(sizes, (INK, "#0a6ab4", "#d9731a"), "osD", strict=False):
        rows = [(row, groups[tokens, model]) for row, model in enumerate(models) if (tokens, model) in groups]
        offset = 0.22 * (sizes.index(tokens) - (len(sizes) - 1) / 2)
        spans = [_span(group, panel) for _, group in rows]
        bars = [[mean - low for mean, low, _ in spans], [high - mean for mean, _, high in spans]]
        axes.errorbar(
            [mean for mean, _, _ in spans], [row + offset for row, _ in rows], xerr=bars, fmt=marker, color=color,
            markersize=4, capsize=2, elinewidth=1, label=f"{tokens:,} tokens",
        )  # fmt: skip
        shown += [value for _, group in rows for value in _values(group, panel)]
        intervals += [(low, high, row + offset, color) for (row, _), (_, low, high) in zip(rows, spans, strict=True)]
    if panel:
        axes.set_xlim(left=0)
    elif shown:  # an interval over seeds of which some do not learn covers everything: it is cut off
        margin = 0.05 * (max(shown) - min(shown)) + 1
        left, right = max(0, min(shown) - margin), min(100, max(shown) + margin)
        axes.set_xlim(left, right)
        for low, high, height, color in intervals:
            for edge, marker, is_cut in ((left, "<", low < left), (right, ">", high > right)):
                if is_cut:
                    axes.plot(edge, height, marker=marker, color=color, markersize=6, clip_on=False)
    if panel == 2 and not shown:
        axes.text(0.5, 0.5, "measured on a GPU only", ha="center", transform=axes.transAxes, color=PALE)


def _values(group: Sequence[Record], panel: int) -> list[float]:
    """Return the number of each seed that a panel shows, where it was measured."""
    if panel == 0:
        return [100 * record["correct"] / record["tested_on"] for record in group if record["correct"] is not None]
    key, unit = (("images_per_second", 1.0), ("peak_bytes", 1e9))[panel - 1]
    return [record[key] / unit for record in group if record[key] is not None]


def _span(group: Sequence[Record], panel: int) -> tuple[float, float, float]:
    """Return the mean over seeds, and where its bar begins and ends."""
    if panel == 0:
        over_seeds = accuracy(group)
        return 100 * over_seeds.mean, 100 * over_seeds.low, 100 * over_seeds.high
    values = _values(group, panel) or [math.nan]
    low, high = min(values), max(values)
    return min(max(low, fmean(values)), high), low, high  # the rounded mean of equal values may lie outside them


EXPERIMENT = Experiment(
    name="vision",
    title="SOFT on images",
    source="Lu et al. 2021 and 2022",
    question="Does attention by a Gaussian kernel through landmarks match softmax on images?",
    run=run,
    needs_model=False,
)
