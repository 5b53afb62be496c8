"""attnorm lab train: language models (lm), keys hidden in text (needle), images (vision); tasks: train_tasks.py."""

import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from attnorm.arithmetic import ceil_div
from attnorm.cli.analysis_options import check_minutes, numbers_of
from attnorm.cli.output import Json, ProgressBar, add_command, failures, say, say_result, show, show_json, usage_errors
from attnorm.provenance import file_hash, recorded_command
from attnorm.run_folder import make_writable, require_folder
from attnorm_lab.cli.train_tasks import (
    Dense,
    Device,
    TrainingDtype,
    WeightDecay,
    clrs,
    folder_option,
    given,
    retrieval,
    training_folder,
)

if TYPE_CHECKING:
    from attnorm_lab.training.lm.train import LMProgress

Compiled = Annotated[
    bool, typer.Option("--compile/--no-compile", help="Compile the blocks of the model with torch.compile.")
]
_KEPT = "Interrupted; checkpoints are kept, and the same command resumes from the last one."


# Defaults with --quick. A larger learning rate trains a mixture to ignore its context, so that its rank is 1.
_LM_QUICK: dict[str, Any] = {
    "layers": 1, "heads": 2, "width": 16, "context": 64, "vocab": 300, "steps": 20, "batch": 8, "warmup": 4,
}  # fmt: skip


def lm(
    out: Annotated[
        Path | None,
        folder_option("lm", "Output folder for the model. The same command resumes an interrupted run from it."),
    ] = None,
    texts: Annotated[
        list[Path] | None,
        typer.Argument(metavar="TEXT", help="Text files to train on, plain or .xz.", show_default="none"),
    ] = None,
    valid: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Held-out text for the validation loss.", show_default="none")
    ] = None,
    architecture: Annotated[
        str, typer.Option(help="Architecture: gpt2, llama (rotary positions) or nope (llama without positions).")
    ] = "gpt2",
    normalizer: Annotated[str, typer.Option(metavar="SPEC", help="Normalizer, as NAME or NAME:KEY=VALUE.")] = "softmax",
    normalizer_options: Annotated[
        str, typer.Option(metavar="KEY=VALUE,...", help="Options of --normalizer, e.g. alpha=1.3.")
    ] = "",
    recipe: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Recipe file that names a normalizer per layer; use it instead of --normalizer."
        ),
    ] = None,
    output: Annotated[
        str,
        typer.Option(
            metavar="softmax|mos:K|moc:K",
            help="Output layer: softmax, a mixture of K softmaxes, or K contexts mixed before one softmax.",
        ),
    ] = "softmax",
    layers: Annotated[int | None, typer.Option(help="Number of layers.", show_default="6")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads per layer.", show_default="6")] = None,
    width: Annotated[
        int | None, typer.Option(help="Width of the model; a multiple of the heads.", show_default="192")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens per training window; also the number of positions of the model.", show_default="1024"
        ),
    ] = None,
    vocab: Annotated[
        int | None,
        typer.Option(help="Vocabulary size of the tokenizer, which is trained on the text.", show_default="4096"),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.", show_default="1000")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Total number of tokens to train on; use it instead of --steps.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Windows per step.", show_default="16")] = None,
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate.", show_default="that of --recipe, else 0.001")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(help="Steps of linear warmup; a cosine schedule to 0 follows.", show_default="100")
    ] = None,
    weight_decay: WeightDecay = 0.1,
    seed: Annotated[int, typer.Option(help="Random seed for weights, windows and the tokenizer's sample.")] = 0,
    dtype: TrainingDtype = None,
    device: Device = None,
    compiled: Compiled = False,
    dense: Dense = False,
    eval_every: Annotated[int, typer.Option(help="Optimizer steps between validations.")] = 250,
    eval_lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Window lengths for the final loss.",
            show_default="1, 2 and 4 times the context, as far as the model has positions",
        ),
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Optimizer steps between checkpoints.")] = 250,
    resume: Annotated[bool, typer.Option(help="Resume from the last checkpoint, or start from scratch.")] = True,
    max_minutes: Annotated[
        float | None, typer.Option(help="Stop training after this many minutes (default: no limit).")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder for encoded texts.", show_default="OUT/data")] = None,
    sample: Annotated[int, typer.Option(help="Number of tokens to generate into sample.txt.")] = 0,
    note: Annotated[str, typer.Option(help="Source and license of the text, for the model card.")] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Train a tiny model for 20 steps on a built-in text, which takes seconds.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a small language model and write a standard Hugging Face folder with a model card.

    Prints the validation loss next to those of unigram and bigram counts on the same tokens. Run the same command again
    to resume an interrupted run. Started with torchrun or accelerate launch, several processes share every batch.

    Exit codes: 1 no disk space or memory; 2 wrong usage or input; 130 interrupted.

    A mixture at the output (--output mos:4) has a logit matrix whose rank can exceed the width. moc:4 has the same
    number of parameters, and its rank cannot exceed the width. training.json names the width at which a plain model
    has as many parameters.

    Example: attnorm lab train lm book.txt --valid other.txt --normalizer ssmax --output mos:4 --out my-lm
    """
    import torch

    from attnorm.models.layer_normalizer import RecipeFile, read_recipe_file
    from attnorm_lab.training.device import Processes
    from attnorm_lab.training.lm.data import write_quick_texts
    from attnorm_lab.training.lm.model import LMSettings
    from attnorm_lab.training.lm.train import train_lm

    first = Processes.launched().first  # only the first of several processes prints
    with usage_errors():
        by_layer = RecipeFile({}) if recipe is None else read_recipe_file(recipe)
        if quick == bool(texts or valid) or bool(texts) != bool(valid):
            raise ValueError("expected TEXT together with --valid FILE, or --quick alone")
        out = training_folder(out, "lm", quick=quick)
        if steps is not None and tokens is not None:
            raise ValueError("expected --steps or --tokens, got both. Remove one.")
        sizes = given(
            _LM_QUICK if quick else {}, layers=layers, heads=heads, width=width, context=context, vocab=vocab,
            steps=steps, batch=batch, warmup=warmup, learning_rate=by_layer.learning_rate if lr is None else lr,
        )  # fmt: skip
        settings = LMSettings(**sizes)
        if tokens is not None:
            settings = replace(settings, steps=ceil_div(tokens, settings.batch * settings.context))
        on_cuda = torch.cuda.is_available() if device is None else device.startswith("cuda")
        settings = replace(
            settings, architecture=architecture, weight_decay=weight_decay, seed=seed,
            dtype=dtype or ("bfloat16" if on_cuda else "float32"),
            normalizer=normalizer, normalizer_options=_parse_options(normalizer_options),
            recipe=by_layer.layers, output=output,
        )  # fmt: skip
        lengths = numbers_of("--eval-lengths", eval_lengths)
        check_minutes("--max-minutes", max_minutes)
        if data is not None:
            require_folder(data)
    with (
        failures(lambda: _KEPT, writes_to=out, out_of_memory="Use a smaller --batch."),
        TemporaryDirectory() as folder,
        ProgressBar() as progress,
    ):
        if not (texts and valid):
            texts, valid = write_quick_texts(Path(folder))
        record = train_lm(
            texts, valid, out, settings, data=data, device=device, compiled=compiled,
            attention="dense" if dense else "engine", resume=resume, evaluate_every=eval_every,
            checkpoint_every=checkpoint_every, max_minutes=max_minutes, lengths=lengths, sample_tokens=sample,
            note=note, command=recorded_command(),
            report=lambda state: _show_progress(progress, state) if first else None,
        )  # fmt: skip
    if not first:
        return
    if as_json:
        show_json(record)
    else:
        from attnorm_lab.training.lm.export import rise_in_words

        show(_loss_table(record["result"]))
        if record["result"]["rise"]:
            say(f"warning: the loss rose: {rise_in_words(record['result']['rise'])}")
    if quick and settings.steps == _LM_QUICK["steps"]:
        say(f"note: {settings.steps} steps of a tiny model only show that training runs. Do not compare its loss.")
    say(f"wrote {out}")


def _show_progress(progress: ProgressBar, state: "LMProgress") -> None:
    metrics = state.metrics or {}
    words = [f"loss {metrics['loss']:.3f}", f"{metrics['tokens_per_second']:,.0f} tokens/s"] if metrics else []
    if "valid_loss" in metrics:
        words.insert(1, f"validation {metrics['valid_loss']:.3f}")
    progress(state.stage, state.done, state.total, detail=", ".join(words), log="valid_loss" in metrics)


def _loss_table(result: dict[str, Any]) -> Table:
    validation = result["validation"]
    table = Table(
        title=f"Validation loss after {result['tokens']:,} tokens",
        caption=f"{validation['tokens']:,} tokens, {validation['bytes']:,} bytes"
        f"{_describe_size(result)}{_describe_speed(result)}",
    )
    table.add_column("")
    for name in ("nats per token", "perplexity", "bits per byte"):
        table.add_column(name, justify="right")
    lengths = validation.get("by_length", ())
    rows = {name: validation[name] for name in ("model", "bigram", "unigram")}
    if len(lengths) > 1:
        rows |= {f"model, windows of {figures['length']:,}": figures for figures in lengths}
    for name, figures in rows.items():
        table.add_row(
            name, f"{figures['nats_per_token']:.3f}", f"{figures['perplexity']:.1f}", f"{figures['bits_per_byte']:.3f}"
        )
    return table


def _describe_size(result: dict[str, Any]) -> str:
    equal = result.get("softmax_of_equal_size")
    other = f" (plain softmax: {equal['parameters']:,} at width {equal['width']})" if equal else ""
    return f"; {result['parameters']:,} parameters{other}"


def _describe_speed(result: dict[str, Any]) -> str:
    speed, peak = (result.get(name) for name in ("tokens_per_second", "peak_memory_bytes"))
    memory = "" if peak is None else f"; at most {peak / 2**30:.2f} GiB of memory"
    return ("" if speed is None else f"; {speed:,.0f} tokens/s") + memory


def _parse_options(text: str) -> dict[str, Any]:
    """Parse 'alpha=1.3,learned=true' to {"alpha": 1.3, "learned": True}."""
    from attnorm.normalizers.spec import parse_value

    options: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not (key and equals and value) or key in options:
            raise ValueError(
                f"--normalizer-options: expected KEY=VALUE,... with each key once, got {part!r} in {text!r}"
            )
        options[key] = parse_value(value)
    return options


def needle(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Model to fine-tune: a folder that attnorm lab train lm wrote, or bundled."
        ),
    ],
    text: Annotated[
        Path, typer.Option(metavar="FILE", help="Text to hide keys in; its last quarter is used for the test.")
    ],
    characters: Annotated[int, typer.Option(help="Number of characters of a pass key.")] = 5,
    keys: Annotated[int, typer.Option(help="Maximum number of keys per window in fine-tuning.")] = 10,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 600,
    batch: Annotated[int, typer.Option(help="Windows per step.")] = 32,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    longer: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Lengths of the test, as multiples of the training length.",
            show_default="1,2,4; 1 for learned positions",
        ),
    ] = None,
    questions: Annotated[int, typer.Option(help="Questions per length and depth (five depths).")] = 20,
    seed: Annotated[int, typer.Option(help="Random seed for the keys and their positions.")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Precision: float32 or bfloat16 (autocast).", show_default="float32 on a CPU, else as trained"
        ),
    ] = None,
    device: Device = None,
    compiled: Compiled = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a copy of the model on hidden pass keys, then count the keys found at increasing lengths.

    The loss covers the answers only. The folder of the model is not changed.

    Example: attnorm lab train needle bundled --text book.txt
    """
    from attnorm_lab.training.needle import NeedleTask, train_needle, usual_longer

    with failures(out_of_memory="Use a smaller --batch."), ProgressBar() as progress:
        times = usual_longer(model) if longer is None else tuple(numbers_of("--longer", longer) or ())
        task = NeedleTask(
            characters=characters, keys=keys, steps=steps, batch=batch, learning_rate=lr, seed=seed,
            questions=questions, longer=times,
        )  # fmt: skip
        record = train_needle(
            model, text, task, device=device, dtype=dtype, compiled=compiled,
            report=lambda step, loss: progress("fine-tuning", step, steps, detail=f"loss {loss:.3f}"),
        )  # fmt: skip
    if as_json:
        show_json(record)
    else:
        show(_keys_found(record))


def _keys_found(record: dict[str, Any]) -> Table:
    task = record["task"]
    depths = list(dict.fromkeys(answer["depth"] for answer in record["answers"]))
    table = Table(
        title="Pass keys found, %",
        caption=f"{task['questions']} questions each, answers of {task['characters']} characters; depth 0 is the start",
    )
    for name in ("length", "all", *(f"depth {depth:g}" for depth in depths), "characters"):
        table.add_column(name, justify="right")
    for length, figures in record["by_length"].items():
        at_length = [answer for answer in record["answers"] if answer["length"] == int(length)]
        cells = [figures["exact"], *(answer["exact"] for answer in at_length), figures["characters"]]
        table.add_row(f"{int(length):,}", *(f"{100 * cell:.0f}" for cell in cells))
    return table


def vision(
    out: Annotated[
        Path | None, folder_option("vision", "Output folder for the model and its record; it must not exist.")
    ] = None,
    images: Annotated[
        Path | None,
        typer.Argument(
            metavar="IMAGES",
            help="Images: a .tar or .tar.xz archive of train/CLASS/*.jpg and test/CLASS/*.jpg.",
            show_default="none",
        ),
    ] = None,
    normalizer: Annotated[
        str, typer.Option(metavar="NAME", help="Normalizer of all heads, options as in soft:landmarks=16.")
    ] = "softmax",
    architecture: Annotated[
        str,
        typer.Option(
            help="Architecture: vit, or pyramid (three stages that merge patches; the last stage uses softmax)."
        ),
    ] = "vit",
    landmarks: Annotated[
        str,
        typer.Option(
            help="How the normalizer soft makes landmarks: means of segments, means of squares, or a learned "
            "convolution."
        ),
    ] = "segments",
    landmark_side: Annotated[
        int, typer.Option(help="With squares or convolution: number of landmarks along each side of an image.")
    ] = 4,
    patch: Annotated[int, typer.Option(help="Pixels along each side of a patch.")] = 4,
    layers: Annotated[int | None, typer.Option(help="Number of layers.", show_default="6")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads per layer.", show_default="3; pyramid: 4")] = None,
    width: Annotated[
        int | None, typer.Option(help="Width of the model; a multiple of the heads.", show_default="192")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Number of passes over the training images.", show_default="30")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Images per step.", show_default="256")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.", show_default="0.001")] = None,
    seed: Annotated[
        int, typer.Option(help="Random seed for weights, the order of images and their random shifts.")
    ] = 0,
    dtype: TrainingDtype = None,
    device: Device = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the layers: faster on a GPU after the first steps.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Train a tiny model on generated textures, which takes seconds.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a ViT or a pyramid on labeled images, test it, and write a Hugging Face folder with an image processor.

    `attnorm analyze DIR --image FILE` then draws where its heads look; soft, gaussian and linear have no weights to
    draw. An interrupted run cannot be resumed. For a pyramid, --layers counts the layers of all stages; --heads and
    --width are those of the last stage.

    Exit codes: 1 no disk space or memory; 2 wrong usage or input; 130 interrupted.

    Example: attnorm lab train vision --quick --architecture pyramid --patch 2 --normalizer soft --landmarks convolution
    --out textures
    """
    with usage_errors():
        if quick == (images is not None):
            raise ValueError(
                "expected IMAGES or --quick, got both" if quick else "expected IMAGES or --quick, got none"
            )
        out = training_folder(out, "vision", quick=quick)
        if dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"--dtype: expected float32 or bfloat16, got {dtype!r}")
        sizes = {"--layers": layers, "--heads": heads, "--width": width, "--epochs": epochs, "--batch": batch}
        for name, size in {**sizes, "--patch": patch}.items():
            if size is not None and size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")
        if lr is not None and not 0 < lr < math.inf:
            raise ValueError(f"--lr: expected a learning rate above 0, got {lr:g}")
    from attnorm_lab.training.device import chosen_device
    from attnorm_lab.training.vision.data import generated_textures, read_archive
    from attnorm_lab.training.vision.model import VisionSettings
    from attnorm_lab.training.vision.train import save_vit, train_vit

    is_pyramid = architecture == "pyramid"
    tiny = {
        "layers": 3 if is_pyramid else 2, "heads": 2, "width": 32, "epochs": 4, "batch": 32, "learning_rate": 5e-3,
    }  # fmt: skip
    if is_pyramid and heads is None:
        heads = 4  # halved from stage to stage
    sizes_and_steps = given(
        tiny if quick else {}, layers=layers, heads=heads, width=width, epochs=epochs, batch=batch, learning_rate=lr
    )
    with failures(writes_to=out, out_of_memory="Use a smaller --batch."), ProgressBar("reading images") as progress:
        if out.exists():
            raise ValueError(f"--out: expected a folder that does not exist, got {out}. Choose another one.")
        make_writable(out.parent)  # before the training takes its time
        torch_device = chosen_device(device)
        settings = VisionSettings(
            normalizer=normalizer, architecture=architecture, landmarks=landmarks, landmark_side=landmark_side,
            patch=patch, seed=seed,
            dtype=dtype or ("bfloat16" if torch_device.type == "cuda" else "float32"),
            **sizes_and_steps,
        )  # fmt: skip
        datasets = generated_textures(128, 64, 16) if images is None else read_archive(images)
        model, record = train_vit(
            settings,
            datasets,
            torch_device,
            compiled=compiled,
            report=lambda step, steps, loss: progress("training", step, steps, detail=f"loss {loss:.3f}"),
        )
        source = (
            "Generated textures (`--quick`)." if images is None else f"`{images.name}`, SHA-256 `{file_hash(images)}`"
        )
        save_vit(model, record, datasets.train.side, out, images=source, command=recorded_command())
    if as_json:
        show_json(record)
    elif record["problem"]:
        say(f"warning: training stopped: {record['problem']}")
    else:
        share = record["correct"] / record["tested_on"]
        loss = "not finite" if record["test_loss"] is None else f"{record['test_loss']:.3f}"
        say_result(
            f"{share:.1%} of {record['tested_on']:,} test images right, loss {loss} "
            f"(training: {record['training_loss'][-1]:.3f}; {record['tokens']:,} patches per image)"
        )
    say(f"wrote {out}")


train = typer.Typer(
    name="train",
    help="Train small models: on text (lm), to find keys in text (needle), to pick from sets (retrieval), to answer "
    "questions about algorithms (clrs), to classify images (vision).",
    no_args_is_help=True,
    epilog="Example: attnorm lab train retrieval --quick --out sets",
)
for command in (lm, needle, retrieval, clrs, vision):
    add_command(train, command)
