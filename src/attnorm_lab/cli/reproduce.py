"""attnorm lab reproduce: reproduce figures and tables of the papers on any model, and say which claims hold."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from attnorm.cli.analysis_options import check_minutes, names_of, numbers_of
from attnorm.cli.output import Json, ProgressBar, failures, plain_table, say, show, show_json, usage_errors
from attnorm.provenance import recorded_command

if TYPE_CHECKING:
    from attnorm_lab.experiments.run import Written

_RESUMES = "finished work is kept, and the same command resumes"
_MEMORY = f"Use --quick or --device cpu; {_RESUMES}."
_COLORS = {"reproduces": "green", "partly": "yellow", "does not": "red", "not decided": "dim", "not tested": "dim"}


Stage = Annotated[
    str | None,
    typer.Option(
        "--stage",
        metavar="STAGE",
        help="Run one stage in DIR. language-models, where several processes may share DIR: prepare, try, rates, main, "
        "measure, needle, export, everything, second-seed, tables. clrs-text: train.",
    ),
]


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Experiments to run, or all (default: list the experiments)."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME|DIR",
            help="Model: Hub name, folder, or bundled (default: gpt2 as in the paper; with --quick: bundled). "
            "spread accepts several. clrs-text --stage train: the pretrained model, a folder or a .gguf "
            "file.",
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text to run on (default: a built-in text; the paper uses War and Peace). language-models accepts "
            "several. clrs-text: training questions (.jsonl).",
        ),
    ] = None,
    valid: Annotated[
        list[Path] | None,
        typer.Option(
            "--valid", metavar="FILE", help="language-models: held-out text; repeatable. clrs-text: test questions."
        ),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            "--images",
            metavar="FILE",
            help="vision: .tar or .tar.xz archive of train/CLASS/*.jpg and test/CLASS/*.jpg (default: train "
            "nothing and plot the records of earlier runs in DIR and in DIR/records.jsonl).",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for figures, tables, verdicts and the index page.")
    ] = (Path("reproduction")),
    quick: Annotated[bool, typer.Option("--quick", help="Use small sizes, which take seconds per experiment.")] = False,
    only: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME,...",
            help="retrieval, language-models, clrs-text, vision: run only these normalizers or models (default: all).",
        ),
    ] = "",
    longest: Annotated[
        int | None,
        typer.Option(
            min=1024,
            metavar="TOKENS",
            help="dispersion, circuits: longest context (default: 8192 and 2048, and twice the model's limit if that "
            "is shorter).",
        ),
    ] = None,
    stage: Stage = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="With --stage: random seeds of the models (default: 0).")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Time limit in minutes (default: none). With --stage: stop training and start no further work "
            "after it. temperature, positions, heads: train only models that finish within it."
        ),
    ] = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole",
            help="With --stage everything or second-seed and --minutes: train only models that can be trained "
            "and tested within the limit.",
        ),
    ] = False,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="With --stage: change a value of the plan, e.g. batch=16; repeatable."
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="30M|124M", help="With --stage: size of the models (default: 30M)."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="With --stage prepare: folder of a tokenizer (default: train one on the text)."
        ),
    ] = None,
    closest: Annotated[
        int | None,
        typer.Option(min=0, help="With --stage second-seed: number of best normalizers to train again (default: 3)."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for everything that is sampled.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="Device: cpu, cuda or, for example, cuda:1 (default: the GPU if there is one).")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Rerun finished experiments from scratch.")] = False,
    as_json: Json = False,
) -> None:
    """Reproduce figures, tables and guidelines of the papers on a model, next to the corrected theory.

    Prints the verdicts. Writes figures and tables to DIR/NAME, and an index page of all experiments to DIR/index.html.
    Finished experiments are not run again. An option that one of the experiments does not use is an error.

    Exit codes: 0 done, whatever the verdicts; 1 no disk space or memory; 2 wrong usage or input; 3 unfinished work
    after --minutes; 130 interrupted.

    Example: attnorm lab reproduce fig2 fig3 --model bundled --quick
    """
    if not names:
        _list_experiments(as_json)
        return
    with usage_errors():
        check_minutes("--minutes", minutes)
    normalizers = names_of(only)
    stage_options = {
        "--seeds": seeds, "--whole": whole or None, "--set": changes, "--size": size, "--tokenizer": tokenizer,
        "--closest": closest,
    }  # fmt: skip
    if stage is not None:
        not_used = {
            "--model": model,
            "--images": images,
            "--longest": longest,
            "--fresh": fresh or None,
            "--json": as_json or None,
        }
        with failures(lambda: f"Interrupted; {_RESUMES}.", writes_to=out, out_of_memory=_MEMORY):
            if names == ["clrs-text"]:
                del not_used["--model"]
                _check_stage(names, not_used | {name: stage_options[name] for name in stage_options if name != "--set"})
                finished = _run_clrs(
                    stage, out, model=model or [], train=text or [], test=valid or [], only=normalizers, quick=quick,
                    changes=changes or [], minutes=minutes, device=device, seed=seed,
                )  # fmt: skip
            else:
                _check_stage(names, not_used)
                if whole and (minutes is None or stage not in ("everything", "second-seed")):
                    limit = "no --minutes" if minutes is None else f"--minutes {minutes:g}"
                    raise ValueError(
                        f"--whole: expected --stage everything or second-seed with --minutes N, got --stage {stage} "
                        f"with {limit}. Change them, or remove --whole."
                    )
                finished = _run_stage(
                    stage, out, quick=quick, size=size, changes=changes or [], tokenizer=tokenizer, texts=text or [],
                    held_out=valid or [], only=normalizers, seeds=numbers_of("--seeds", seeds) or (seed,),
                    max_minutes=minutes, whole=whole, device=device, count=3 if closest is None else closest,
                )  # fmt: skip
        say(f"{stage}: {'finished' if finished else 'not finished'}")
        raise typer.Exit(0 if finished else 3)
    unused = [option for option, value in stage_options.items() if value is not None]
    if unused:
        stages = "--stage prepare --text FILE --valid FILE, then --stage everything"
        stages = "--stage train" if names == ["clrs-text"] else stages
        unknown = "" if size is None else _unknown_size(size)
        raise typer.BadParameter(
            f"{unknown}{unused[0]}: expected --stage too, got none. Run {stages}, or remove {unused[0]}."
        )
    from attnorm_lab.experiments.catalogue import MODEL, check_options, named
    from attnorm_lab.experiments.experiment import ExperimentSubject, UnfinishedError
    from attnorm_lab.experiments.run import INDEX
    from attnorm_lab.experiments.run import reproduce as run

    with usage_errors():
        check_options([experiment.name for experiment in named(names)], {MODEL: model or ()})
    first, *others = _models_to_run(model, names, quick)
    subject = ExperimentSubject(
        model=first,
        others=tuple(others),
        texts=tuple(text or ()),
        valid=tuple(valid or ()),
        quick=quick,
        seed=seed,
        device=device,
        only=tuple(normalizers),
        longest=longest,
        images=images,
        minutes=minutes,
    )
    _note_default_text(first, text)
    with (
        failures(lambda: f"Interrupted; {_RESUMES}.", writes_to=out, out_of_memory=_MEMORY),
        _explain_default_model(first, chosen=bool(model)),
        ProgressBar("loading") as progress,
    ):
        try:
            written = run(names, subject, out, fresh=fresh, progress=progress, command=recorded_command())
        except UnfinishedError as error:
            say(f"not finished: {error}; {_RESUMES}")
            raise typer.Exit(3) from None
    if as_json:
        show_json({"index": str(out / INDEX), "experiments": [_as_dict(result) for result in written]})
    else:
        show(Group(*(_findings_table(result) for result in written)))
    say(f"index page: {out / INDEX}")


def _check_stage(names: list[str], not_used: dict[str, Any]) -> None:
    if len(names) > 1 or names[0] not in ("language-models", "clrs-text"):
        raise ValueError(f"--stage: expected language-models or clrs-text alone, got {', '.join(names)}. Remove it.")
    refused = [option for option, value in not_used.items() if value is not None]
    if refused:
        raise ValueError(f"--stage: expected no {refused[0]}, which stages do not use. Remove it.")


def _unknown_size(size: str) -> str:
    """Return a sentence that names the known sizes if `size` is none of them."""
    from attnorm_lab.experiments.language_models.train import SIZES

    return "" if size in SIZES else f"--size: expected {' or '.join(SIZES)}, got {size!r}. "


def _run_stage(stage: str, folder: Path, *, quick: bool, size: str | None, changes: list[str], **options: Any) -> bool:
    from attnorm_lab.experiments.language_models.stages import run_stage
    from attnorm_lab.experiments.language_models.train import QUICK, SIZES
    from attnorm_lab.experiments.trained_models import change_plan, on_this_machine

    if size is not None and (quick or size not in SIZES):
        raise ValueError(
            f"expected --size {' or '.join(SIZES)} and no --quick, got --size {size}. Change or remove --size."
        )
    plan = on_this_machine(change_plan(QUICK if quick else SIZES[size or "30M"], changes))
    return run_stage(stage, folder, plan, log=_timed_log(), **options)


def _run_clrs(
    stage: str, folder: Path, *, model: list[str], train: list[Path], test: list[Path], only: list[str], quick: bool,
    changes: list[str], minutes: float | None, device: str | None, seed: int,
) -> bool:  # fmt: skip
    from attnorm_lab.experiments.clrs_text.workspace import FULL, QUICK, ClrsWorkspace, run_items
    from attnorm_lab.experiments.trained_models import change_plan
    from attnorm_lab.training.device import chosen_device

    if stage != "train":
        raise ValueError(f"--stage: expected train for clrs-text, got {stage!r}. Use --stage train.")
    if max(len(model), len(train), len(test)) > 1:
        raise ValueError("clrs-text: expected one --model, one --text and one --valid, got several. Run once for each.")
    if not quick and not (train and test):
        given = " ".join(name for name, files in (("--text", train), ("--valid", test)) if files) or "none"
        raise ValueError(
            f"--stage train: expected --text FILE to train on and --valid FILE to test on, got {given}. Give both, "
            "or --quick."
        )
    chosen_device(device)
    log = _timed_log()
    plan = change_plan(QUICK if quick else FULL, changes).only(only)
    log("reading and encoding the questions")
    workspace = ClrsWorkspace.open(
        folder, plan, model=Path(model[0]) if model else None, train=train[0] if train else None,
        test=test[0] if test else None, seed=seed,
    )  # fmt: skip
    return run_items(workspace, minutes=minutes, device=device, log=log)


def _timed_log() -> Callable[[str], None]:
    started = time.monotonic()

    def log(words: str) -> None:
        say(f"[{time.monotonic() - started:6.1f} s] {words}")

    return log


def _models_to_run(given: list[str] | None, names: list[str], quick: bool) -> list[str]:
    from attnorm_lab.experiments.catalogue import EXPERIMENTS, MODEL
    from attnorm_lab.experiments.experiment import default_model

    # Experiments that bring or train their own models must not look for one.
    own = all(name in EXPERIMENTS and MODEL not in EXPERIMENTS[name].takes for name in names)
    return given or [default_model(quick=quick or own)]


def _note_default_text(model: str, texts: list[Path] | None) -> None:
    """Print which text is used if the paper's model runs on another text than the paper's."""
    from attnorm.analysis.settings import TOPICS
    from attnorm_lab.experiments.experiment import PAPER_MODEL, PAPER_TEXT

    if model.rsplit("/", 1)[-1] == PAPER_MODEL and not texts:
        say(f"{model} on {TOPICS}, Python's own help texts; the paper's text is {PAPER_TEXT}: give it with --text FILE")


@contextmanager
def _explain_default_model(model: str, *, chosen: bool) -> Iterator[None]:
    """Explain the default model if it cannot be loaded, and what needs no network."""
    try:
        yield
    except ValueError as error:
        if chosen or not str(error).startswith(f"{model}: "):
            raise
        raise ValueError(
            f"{str(error).rstrip('.')}. The default model is {model}, as in the paper. Use --model bundled, "
            "--model FOLDER or --quick, which need no network."
        ) from None


def _list_experiments(as_json: bool) -> None:
    from attnorm_lab.experiments.catalogue import EXPERIMENTS, PAPERS

    if as_json:
        show_json([{"name": name, "what": entry.what, "in_all": name in PAPERS} for name, entry in EXPERIMENTS.items()])
        return
    table = plain_table(show_header=False)
    for name, entry in EXPERIMENTS.items():
        table.add_row(name, entry.what)
    table.add_row("all", ", ".join(PAPERS))
    show(table)


def _as_dict(written: "Written") -> dict[str, Any]:
    record = written.record
    kept = {name: record[name] for name in ("name", "title", "source", "words", "findings", "parameters")}
    manifest = record["manifest"]
    same = {name: manifest[name] for name in ("paper_setting",) if name in manifest}
    return {
        **kept,
        **same,
        "folder": str(written.folder),
        "seconds": manifest["seconds"],
        "found_finished": written.found,
    }


def _findings_table(written: "Written") -> Group:
    record = written.record
    table = Table(box=None, padding=(0, 2, 1, 0), show_header=bool(written.findings))
    table.add_column("claim", ratio=4)
    table.add_column("ours", ratio=5)
    table.add_column("verdict", no_wrap=True)
    for finding in written.findings:
        color = _COLORS.get(finding["verdict"], "default")
        table.add_row(finding["claim"], finding["ours"], Text(finding["verdict"], style=color))
    again = " (found finished)" if written.found else ""
    same = record["manifest"].get("paper_setting", {}).get("sentence", "")
    return Group(
        Text.assemble((record["title"], "bold"), again),
        record["words"],
        *([Text(same, style="dim")] if same else []),
        "",
        table,
    )
