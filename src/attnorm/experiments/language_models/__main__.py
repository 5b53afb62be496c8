"""The stages one by one, for machines that have torch and transformers and little else.

python -m attnorm.experiments.language_models prepare --folder lm --train a.txt.xz --valid b.txt --other c.txt
python -m attnorm.experiments.language_models everything --folder lm --minutes 9 --only softmax,ssmax
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnorm.experiments.language_models import stages
from attnorm.experiments.language_models.engine_choice import choose_engines
from attnorm.experiments.language_models.plan import FULL, QUICK, LanguageModelPlan, on_this_machine
from attnorm.experiments.language_models.results import contenders
from attnorm.experiments.language_models.tables import all_tables
from attnorm.experiments.language_models.workspace import RESULTS, Workspace
from attnorm.files import write_text
from attnorm.training.interruption import TrainingInterrupted

STARTED = time.monotonic()


def main(arguments: list[str] | None = None) -> int:
    told = _parser().parse_args(arguments)
    plan = changed(QUICK if told.quick else FULL, told.set)
    if told.quick or told.cpu:
        plan = on_this_machine(plan)
    if told.stage == "prepare" and not (told.train and told.valid):
        raise ValueError("prepare needs texts: --train FILE [FILE ...] --valid FILE, and --other FILE for more")
    if told.stage == "tables" and not (Path(told.folder) / RESULTS).exists():
        raise ValueError(f"{told.folder} has no {RESULTS}; name the folder that the stages wrote to")
    workspace = Workspace.open(Path(told.folder), plan)
    only = [name for name in told.only.split(",") if name] or None
    seeds = [int(seed) for seed in told.seeds.split(",")]
    limits: dict[str, Any] = {"max_minutes": told.minutes, "device": told.device, "say": log}
    if told.stage == "prepare":
        stages.prepare(workspace, told.train, told.valid, told.other)
        finished = True
    elif told.stage == "tables":
        finished = write_tables(workspace.results(), workspace.folder)
    elif told.stage == "try":
        choose_engines(workspace, only, **limits)
        finished = True
    elif told.stage == "rates":
        finished = stages.rates(workspace, only, **limits)
    elif told.stage == "second-seed":
        names = only or list(stages.closest(workspace, told.closest))
        finished = stages.everything(workspace, names, seeds=[1], **limits)
    else:
        finished = getattr(stages, told.stage)(workspace, only, seeds=seeds, **limits)
    log(f"{told.stage} {told.only}: {'finished' if finished else 'not all of it is finished'}")
    return 0 if finished else 3


def changed(plan: LanguageModelPlan, changes: list[str]) -> LanguageModelPlan:
    """NAME=VALUE with VALUE in JSON: main_tokens=50000000, rates=[0.001,0.002], needle.steps=300.

    Raises:
        ValueError: The plan has no such name, or the value is no JSON.
    """
    for change in changes:
        name, _, text = change.partition("=")
        part, dot, inner = name.partition(".")
        if part not in plan.as_dict() or (dot and inner not in plan.as_dict()[part]):
            raise ValueError(f"--set {change}: the plan has no {name!r}; it has {', '.join(plan.as_dict())}")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            raise ValueError(f"--set {change}: the value must be JSON, as in batch=16 or rates=[0.001,0.002]") from None
        value = tuple(value) if isinstance(value, list) else value
        if dot:
            value = replace(getattr(plan, part), **{inner: value})
        plan = replace(plan, **{part: value})
    return plan


def write_tables(lines: list[dict[str, Any]], folder: Path) -> bool:
    """tables.md, and the figures where matplotlib is installed.

    Raises:
        ValueError: No model is finished.
    """
    if not contenders(lines):
        raise ValueError(f"{folder / RESULTS} has no model whose losses were measured; run 'everything' first")
    write_text(folder / "tables.md", all_tables(lines))
    try:
        from attnorm.experiments.figure_style import save, style
        from attnorm.experiments.language_models.figure import comparison_figure, course_figure
    except ModuleNotFoundError:
        return False
    with style():
        save(comparison_figure(contenders(lines)), folder / "language-models")
        save(course_figure(lines), folder / "course")
    return True


def log(words: str) -> None:
    sys.stdout.write(f"[{time.monotonic() - STARTED:6.1f} s] {words}\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m attnorm.experiments.language_models", description=__doc__)
    stage = ("tables", "prepare", "try", "rates", "main", "measure", "needle", "export", "everything", "second-seed")
    parser.add_argument("stage", choices=stage)
    parser.add_argument("--folder", required=True, help="shared by all processes of one plan")
    parser.add_argument("--train", nargs="*", default=[], type=Path, help="texts to train on (prepare)")
    parser.add_argument("--valid", type=Path, help="text that nothing is trained on (prepare)")
    parser.add_argument("--other", nargs="*", default=[], type=Path, help="more such texts (prepare)")
    parser.add_argument("--only", default="", help="normalizers, with commas between")
    parser.add_argument("--seeds", default="0", help="seeds, with commas between")
    parser.add_argument("--closest", type=int, default=3, help="how many get a second seed")
    parser.add_argument("--minutes", type=float, help="begin nothing after so many, and stop training")
    parser.add_argument("--device")
    parser.add_argument("--quick", action="store_true", help="tiny models")
    parser.add_argument("--cpu", action="store_true", help="float32, nothing compiled")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="change the plan")
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TrainingInterrupted as stopped:
        log(str(stopped))
        sys.exit(130)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
