"""Which tests run, and what is equal for all of them: one thread, fixed random seeds, checks of annotated shapes."""
# ruff: noqa: E402 - some variables are read once, when torch or Triton is imported

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers on two cores must not fight over them
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import jaxtyping
import numpy as np
import pytest
import setuptools  # noqa: F401  # torch.compile needs it, and it must come before anyone's distutils
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run, slowly, on a CPU
torch.set_num_threads(1)

# Shape annotations are dense in theory. mypy checks the other annotations.
jaxtyping.install_import_hook("attnorm.theory", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

from attnorm.engines.execution import HAS_TRITON, known_calls
from attnorm.normalizers import registry
from tests.case_selection import pytest_collection_modifyitems as pytest_collection_modifyitems
from tests.fast_interpreter import speed_up_interpreter
from tests.miscompiled_reductions import refuse_scattered
from tests.real_model import smollm2 as smollm2

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parent
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")  # the first takes 3/4 of the time

if not torch.cuda.is_available():
    speed_up_interpreter()

hypothesis.settings.register_profile("fixed", deadline=None, max_examples=40, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=500, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Random seeds for each test. Registered normalizers, known calls and a lower precision of products end with it."""
    torch.set_float32_matmul_precision("highest")  # training lowers it
    random.seed(0)
    np.random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)  # torch.manual_seed formats a stack trace per absent device: 4 ms a test
    registered = registry._registered
    registry._registered = dict(registered)
    known_calls.forget()
    yield
    registry._registered = registered


@pytest.fixture(scope="session", autouse=True)
def _refuse_wrongly_compiled_kernels() -> Iterator[None]:
    """The numbers of such a kernel may come close enough to pass."""
    with pytest.MonkeyPatch.context() as patch:
        if HAS_TRITON and torch.cuda.is_available():
            import triton

            if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7):
                patch.setattr(triton.knobs.compilation, "listener", refuse_scattered)
        yield


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} on the path; install one to test pages in a browser")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=flags)
        yield started
        started.close()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared texts and tokenizers, which are not part of the package."""
    folder = Path(os.environ.get("ATTNORM_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}; set ATTNORM_SHARED to the folder that holds it")
    return folder
