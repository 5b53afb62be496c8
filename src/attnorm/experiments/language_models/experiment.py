"""`attnorm reproduce language-models`: the full plan on given texts, or a tiny one on built-in text.

With `--stage` it runs in stages. Each takes normalizers and a time limit in minutes, and returns whether all of its
work is finished. A stage does not repeat finished work and skips work that another process has claimed, so several
processes can share one folder.
"""

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import pyarrow as pa

from attnorm.analysis.settings import passage, topics
from attnorm.experiments.experiment import (
    Experiment,
    ExperimentFinding,
    ExperimentSubject,
    Outcome,
    ProgressCallback,
    Verdict,
)
from attnorm.experiments.language_models.evaluate import measure, needle
from attnorm.experiments.language_models.figure import comparison_figure, course_figure
from attnorm.experiments.language_models.results import Line, LMContender, all_tables, contenders, summary
from attnorm.experiments.language_models.train import (
    Log,
    OutOfTimeError,
    Worker,
    check_whole,
    choose_engines,
    export_main,
    free_memory,
    train_main,
    train_to_test,
    try_rates,
)
from attnorm.experiments.language_models.workspace import (
    FULL,
    QUICK,
    RESULTS,
    SOFTMAX,
    LanguageModelPlan,
    LMWorkspace,
    on_this_machine,
    prepare_texts,
    read_results,
    read_texts,
)
from attnorm.figures import save, style
from attnorm.files import write_text
from attnorm.text import did_you_mean

SECOND_SEEDS = 3  # normalizers with the lowest losses
MIN_TOKENS = 10_000_000
TOO_SMALL = "Models this small, on so few tokens, show that everything runs, not which normalizer is better."
HELD_OUT_SHARE = 0.3  # of the bundled text
NO_VERDICT = 0.02  # nats: equivalent normalizers differ by this much between runs
Names = Sequence[str] | None
Work = Callable[[Worker, str, int], None]
MAX_PROBLEMS = 3  # attempts: a GPU may have been full for a moment

WORKS: dict[str, Sequence[Work]] = {
    "rates": [try_rates],
    "main": [train_main],
    "measure": [measure],
    "needle": [needle],
    "export": [export_main],
    # All of one normalizer before the next, so that a time limit leaves complete results.
    "everything": [check_whole, try_rates, train_to_test, measure, needle],
}
STAGES = ("prepare", "try", "rates", "main", "measure", "needle", "export", "everything", "second-seed", "tables")


class Limits(TypedDict, total=False):
    """Keyword arguments of every stage."""

    seeds: Sequence[int]
    max_minutes: float | None
    whole: bool
    device: str | None
    log: Log


def _run(subject: ExperimentSubject, progress: ProgressCallback, folder: Path) -> Outcome:
    plan = on_this_machine(QUICK if subject.quick else FULL)
    workspace = LMWorkspace.open(folder, plan)
    train, valid, others = texts_of(subject, folder)
    names = plan.chosen(subject.only)
    progress("encoding the texts", 0, len(names) + 1)
    prepare_texts(workspace, train, valid, others)
    for done, name in enumerate(names, 1):
        progress(f"training and testing {name}", done, len(names) + 1)
        run_works(workspace, "everything", [name], seeds=[subject.seed], device=subject.device)
    if not subject.quick and not subject.only:
        best = closest(workspace, SECOND_SEEDS, seed=subject.seed)
        run_works(workspace, "everything", best, seeds=[subject.seed + 1], device=subject.device)
    progress("drawing", len(names) + 1, len(names) + 1)
    return outcome(workspace.results(), plan)


def run_stage(
    stage: str,
    folder: Path,
    plan: LanguageModelPlan,
    *,
    texts: Sequence[Path] = (),
    held_out: Sequence[Path] = (),
    tokenizer: Path | None = None,
    only: Names = None,
    count: int = 3,
    **limits: Unpack[Limits],
) -> bool:
    """Run one of STAGES in a folder that several processes may share; return whether all of it is finished.

    texts, held_out: for `prepare`; the first held-out text is the validation text. tokenizer: also for `prepare`.
    count: for `second-seed`, which runs everything for seed 1: how many normalizers besides softmax, if none is named.

    Raises:
        ValueError: Unknown stage, texts missing, or a folder of another plan.
    """
    if stage not in STAGES:
        raise ValueError(f"unknown stage {stage!r}; {did_you_mean(stage, STAGES)}")
    if stage == "prepare" and not (texts and held_out):
        raise ValueError("the stage prepare needs texts: --text FILE to train on and --valid FILE held out")
    if stage == "tables":
        write_tables(folder)
        return True
    workspace = LMWorkspace.open(folder, plan)
    if stage == "prepare":
        prepare_texts(workspace, texts, held_out[0], held_out[1:], tokenizer)
        return True
    if stage == "try":
        choose_engines(
            workspace, only, max_minutes=limits.get("max_minutes"), device=limits.get("device"),
            log=limits.get("log", lambda message: None),
        )  # fmt: skip
        return True
    if stage == "second-seed":
        limits["seeds"] = [1]
        return run_works(workspace, "everything", only or closest(workspace, count), **limits)
    return run_works(workspace, stage, only, **limits)


def run_works(
    workspace: LMWorkspace,
    stage: str,
    normalizers: Names = None,
    *,
    seeds: Sequence[int] = (0,),
    max_minutes: float | None = None,
    whole: bool = False,
    device: str | None = None,
    log: Log = lambda message: None,
) -> bool:
    """Do the work of one of WORKS for these normalizers (default: all); return whether all of it is finished.

    whole: train no model that cannot be finished and tested in max_minutes.
    """
    texts = read_texts(workspace)
    worker = Worker.at(workspace, texts, device=device, max_minutes=max_minutes, log=log, whole=whole)
    finished = True
    for seed in seeds:
        for normalizer in workspace.plan.chosen(list(normalizers or ())):
            if len(workspace.results(stage="problem", normalizer=normalizer, seed=seed)) >= MAX_PROBLEMS:
                finished = False
                continue
            with workspace.claimed(f"{normalizer}-seed-{seed}") as acquired:
                finished &= acquired and _try_works(worker, WORKS[stage], normalizer, seed)
    return finished


def _try_works(worker: Worker, works: Sequence[Work], normalizer: str, seed: int) -> bool:
    try:
        for work in works:
            work(worker, normalizer, seed)
    except OutOfTimeError:
        return False
    except Exception as error:  # a compiler or a full GPU may raise anything; the other normalizers continue
        worker.log(f"{normalizer} seed {seed}: {traceback.format_exc()[-2000:]}")
        worker.workspace.add(
            {"stage": "problem", "normalizer": normalizer, "seed": seed, "problem": f"{type(error).__name__}: {error}"}
        )
        free_memory()
        return False
    return True


def closest(workspace: LMWorkspace, count: int, seed: int = 0) -> tuple[str, ...]:
    """Return softmax and the `count` normalizers whose main runs ended with the lowest loss."""
    ended = {
        line["normalizer"]: line["valid_loss"]
        for line in workspace.results(stage="main", seed=seed)
        if line["valid_loss"] is not None
    }
    best = {SOFTMAX, *sorted(ended, key=lambda name: ended[name])[:count]}
    return tuple(name for name in workspace.plan.normalizers if name in best and name in ended)


def write_tables(folder: Path) -> None:
    """Write tables.md and the figures from the results of a folder.

    Raises:
        ValueError: The folder has no results, or no model is finished.
    """
    if not (folder / RESULTS).exists():
        raise ValueError(f"{folder} has no {RESULTS}; name the folder that the stages wrote to")
    lines = read_results(folder / RESULTS)
    if not contenders(lines):
        raise ValueError(f"{folder / RESULTS} has no model whose losses were measured; run 'everything' first")
    write_text(folder / "tables.md", all_tables(lines))
    with style():
        save(comparison_figure(contenders(lines)), folder / "language-models")
        save(course_figure(lines), folder / "course")


def outcome(lines: Sequence[Line], plan: LanguageModelPlan) -> Outcome:
    """Return figures, tables and findings of the results.

    Raises:
        ValueError: No model is finished.
    """
    models = contenders(lines)
    if not models:
        problems = [f"{line['normalizer']}: {line['problem']}" for line in lines if line["stage"] == "problem"]
        raise ValueError(f"no model is finished: {'; '.join(problems) or 'nothing was trained yet'}")
    return Outcome(
        summary=summary(models) + ("" if plan.main_tokens >= MIN_TOKENS else f" {TOO_SMALL}"),
        findings=_findings(models, judge_claims=plan.main_tokens >= MIN_TOKENS),
        figures={"language-models": comparison_figure(models), "course": course_figure(lines)},
        tables={"models": _table(models)},
        parameters=plan.as_dict(),
    )


def texts_of(subject: ExperimentSubject, folder: Path) -> tuple[list[Path], Path, list[Path]]:
    """Return the texts for training, for validation, and further held-out texts.

    Raises:
        ValueError: No training text, or no validation text.
    """
    if subject.texts and subject.valid:
        return list(subject.texts), subject.valid[0], list(subject.valid[1:])
    if subject.texts or subject.valid or not subject.quick:
        given = "--text only" if subject.texts else "--valid only" if subject.valid else "neither"
        raise ValueError(
            f"expected --text to train on and --valid to measure on (.txt or .txt.xz), got {given}. Give both, or "
            "--quick alone, which uses text that is part of Python."
        )
    all_topics = topics()
    cut = all_topics.rfind("\n", 0, int((1 - HELD_OUT_SHARE) * len(all_topics))) + 1
    contents = {"python-topics": all_topics[:cut], "python-topics-held-out": all_topics[cut:], "passage": passage()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    train, valid, other = (folder / f"{name}.txt" for name in contents)
    return [train], valid, [other]


def _findings(models: Sequence[LMContender], *, judge_claims: bool) -> tuple[ExperimentFinding, ...]:
    """Compare every normalizer with softmax; no paper has this comparison under equal conditions."""
    by_name = {model.name: model for model in models}
    softmax = by_name.get(SOFTMAX)
    if softmax is None:
        return ()
    text, lengths = next((text, list(by)) for text, by in softmax.losses.items())
    findings = []
    for model in models:
        if model is softmax:
            continue
        first, last = (model.losses[text][n].mean - softmax.losses[text][n].mean for n in (lengths[0], lengths[-1]))
        findings.append(
            ExperimentFinding(
                claim=f"{model.name} models text better than softmax, at the training length or beyond",
                ours=f"{first:+.4f} nats per token at {lengths[0]:,}, {last:+.4f} at {lengths[-1]:,}",
                verdict=_verdict(first, last) if judge_claims else "not tested",
                why=f"{model.seeds} seed{'s' if model.seeds > 1 else ''}" if judge_claims else TOO_SMALL,
            )
        )
    return tuple(findings)


def _verdict(*differences: float) -> Verdict:
    """Return "reproduces" if the loss is clearly lower at the training length and beyond, "partly" if at one."""
    better = [difference < -NO_VERDICT for difference in differences]
    return "reproduces" if all(better) else "partly" if any(better) else "does not"


def _table(models: Sequence[LMContender]) -> pa.Table:
    rows: list[dict[str, Any]] = []
    for model in models:
        row: dict[str, Any] = {"normalizer": model.normalizer, "at_inference": model.at_inference, "seeds": model.seeds}
        row |= {
            f"loss_{text}_{length}": spread.mean for text, by in model.losses.items() for length, spread in by.items()
        }
        row |= {f"keys_found_{length}": spread.mean for length, spread in model.keys_found.items()}
        row |= {f"characters_found_{length}": spread.mean for length, spread in model.characters.items()}
        row |= {name: getattr(model, name) for name in ("learning_rate", "tokens", "tokens_per_second")}
        rows.append({**row, "peak_memory_bytes": model.peak_memory_bytes, **model.attention})
    return pa.Table.from_pylist(rows)


EXPERIMENT = Experiment(
    name="language-models",
    title="Language models with one normalizer each",
    source="no paper: each compares its normalizer with softmax alone, in a harness of its own",
    question="Trained alike on the same tokens, which normalizer models text best, and which finds a key again?",
    run=_run,
    needs_model=False,
)
