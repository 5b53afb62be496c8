"""`attnorm lab reproduce language-models`: the full plan on given texts, or a tiny one on built-in text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from attnorm.models.layer_normalizer import SOFTMAX
from attnorm_lab.experiments.experiment import (
    Experiment,
    ExperimentFinding,
    ExperimentSubject,
    Outcome,
    ProgressCallback,
    Verdict,
    judge,
)
from attnorm_lab.experiments.language_models import stages
from attnorm_lab.experiments.language_models.figure import comparison_figure
from attnorm_lab.experiments.language_models.results import Line, LMContender, contenders, summary
from attnorm_lab.experiments.language_models.train import FULL, QUICK, LanguageModelPlan, LMWorkspace
from attnorm_lab.experiments.trained_models import on_this_machine, prepare_texts, texts_of
from attnorm_lab.training.device import check_accelerate, chosen_device

SECOND_SEEDS = 3  # normalizers with the lowest losses
MIN_TOKENS = 10_000_000
TOO_SMALL = "Models this small, on so few tokens, show that everything runs, not which normalizer is better."
NO_VERDICT = 0.02  # nats: equivalent normalizers differ by this much between runs


def _run(subject: ExperimentSubject, progress: ProgressCallback, folder: Path) -> Outcome:
    plan = on_this_machine(QUICK if subject.quick else FULL)
    names = plan.chosen(subject.only)
    check_accelerate()
    if chosen_device(subject.device).type == "cpu":
        stages.check_memory(plan)
    workspace = LMWorkspace.open(folder, plan)
    train, valid, others = texts_of(subject, folder)
    progress("encoding the texts", 0, len(names) + 1)
    prepare_texts(workspace, train, valid, others)
    for done, name in enumerate(names, 1):
        progress(f"training and testing {name}", done, len(names) + 1)
        stages.run_works(workspace, "everything", [name], seeds=[subject.seed], device=subject.device)
    if not subject.quick and not subject.only:
        best = stages.closest(workspace, SECOND_SEEDS, seed=subject.seed)
        stages.run_works(workspace, "everything", best, seeds=[subject.seed + 1], device=subject.device)
    progress("drawing", len(names) + 1, len(names) + 1)
    return outcome(workspace.results(), plan)


def outcome(lines: Sequence[Line], plan: LanguageModelPlan) -> Outcome:
    """Return figures, tables and findings of the results.

    Raises:
        ValueError: No model is finished.
    """
    models = contenders(lines)
    if not models:
        problems = [f"{line['normalizer']}: {line['problem']}" for line in lines if line["stage"] == "problem"]
        raise ValueError(
            f"expected at least one finished model, got none: {'; '.join(problems) or 'nothing was trained yet'}"
        )
    return Outcome(
        summary=summary(models) + ("" if plan.main_tokens >= MIN_TOKENS else f" {TOO_SMALL}"),
        findings=_findings(models, judge_claims=plan.main_tokens >= MIN_TOKENS),
        figures={"language-models": comparison_figure(models)},
        tables={"models": _table(models)},
        parameters=plan.as_dict(),
    )


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
    return judge(all(better), partly=any(better))


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
