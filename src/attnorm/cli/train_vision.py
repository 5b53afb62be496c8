"""attnorm train vision: train a small vision transformer to classify images."""

from pathlib import Path
from typing import Annotated, Any

import typer

from attnorm.cli.output import Json, ProgressBar, failures, say, say_result, show_json, usage_errors
from attnorm.cli.train_retrieval import Device


def vision(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the model and its record; must not exist.")],
    images: Annotated[
        Path | None,
        typer.Argument(
            metavar="IMAGES",
            help=".tar or .tar.xz archive of train/CLASS/*.jpg and test/CLASS/*.jpg.",
            show_default="none",
        ),
    ] = None,
    normalizer: Annotated[
        str, typer.Option(metavar="NAME", help="Normalizer of all heads, options as in soft:landmarks=16.")
    ] = "softmax",
    architecture: Annotated[
        str, typer.Option(help="vit, or pyramid: three stages that merge patches, the last one with softmax.")
    ] = "vit",
    landmarks: Annotated[
        str, typer.Option(help="Landmarks of soft: segments, squares (means) or convolution (learned).")
    ] = "segments",
    landmark_side: Annotated[
        int, typer.Option(help="Landmarks along the side of an image, for squares and convolution.")
    ] = 4,
    patch: Annotated[int, typer.Option(help="Pixels along each side of a patch.")] = 4,
    layers: Annotated[int | None, typer.Option(help="Number of layers.", show_default="6")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads per layer.", show_default="3; pyramid: 4")] = None,
    width: Annotated[
        int | None, typer.Option(help="Width of the model; a multiple of the heads.", show_default="192")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training images.", show_default="30")] = None,
    batch: Annotated[int | None, typer.Option(help="Images per step.", show_default="256")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.", show_default="0.001")] = None,
    seed: Annotated[int, typer.Option(help="Random seed for weights, order and shifts of images.")] = 0,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16 (autocast).", show_default="bfloat16 on CUDA, else float32")
    ] = None,
    device: Device = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the layers: faster on a GPU after the first steps.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model on generated textures: seconds.")] = False,
    as_json: Json = False,
) -> None:
    """Train a ViT or a pyramid on labelled images, test it, and write a Hugging Face folder with an image processor.

    `attnorm analyze DIR --image FILE` then draws where its heads look; soft, gaussian and linear have no weights to
    draw. An interrupted run starts again. --layers of a pyramid are those of all stages; --heads and --width those of
    the last one.

    Exit codes: 1 no disk space or memory; 2 wrong usage or input; 130 interrupted.

    Example: attnorm train vision --quick --architecture pyramid --patch 2 --normalizer soft --landmarks convolution
    --out textures
    """
    with usage_errors():
        if quick == (images is not None):
            raise ValueError(
                "expected IMAGES or --quick, got both" if quick else "expected IMAGES or --quick, got none"
            )
        if dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"--dtype: expected float32 or bfloat16, got {dtype!r}")
    from attnorm.training.device import chosen_device
    from attnorm.training.vision.images import generated_textures, read_archive
    from attnorm.training.vision.train import VisionSettings, save_vit, train_vit

    options = {
        "layers": layers, "heads": heads, "width": width, "epochs": epochs, "batch": batch, "learning_rate": lr,
    }  # fmt: skip
    if architecture == "pyramid" and heads is None:
        options["heads"] = 4  # halved from stage to stage
    tiny: dict[str, Any] = (
        {
            "layers": 3 if architecture == "pyramid" else 2,
            "heads": 2,
            "width": 32,
            "epochs": 4,
            "batch": 32,
            "learning_rate": 5e-3,
        }
        if quick
        else {}
    )
    with failures(writes_to=out, out_of_memory="Use a smaller --batch."), ProgressBar("reading images") as progress:
        if out.exists():
            raise ValueError(f"--out: expected a folder that does not exist, got {out}. Choose another one.")
        torch_device = chosen_device(device)
        settings = VisionSettings(
            normalizer=normalizer, architecture=architecture, landmarks=landmarks, landmark_side=landmark_side,
            patch=patch, seed=seed,
            dtype=dtype or ("bfloat16" if torch_device.type == "cuda" else "float32"),
            **(tiny | {name: value for name, value in options.items() if value is not None}),
        )  # fmt: skip
        datasets = generated_textures(128, 64, 16) if images is None else read_archive(images)
        model, record = train_vit(
            settings,
            datasets,
            torch_device,
            compiled=compiled,
            report=lambda step, steps: progress("training", step, steps),
        )
        save_vit(model, record, datasets.train.side, out)
    if as_json:
        show_json(record)
        return
    if record["problem"]:
        say(f"warning: training stopped: {record['problem']}")
    else:
        share = record["correct"] / record["tested_on"]
        say_result(f"{share:.1%} of {record['tested_on']:,} test images right ({record['tokens']:,} patches per image)")
    say(f"wrote {out}")
