"""Train and test one CLRS-Text model in a folder; an interrupted run resumes, a finished one is not repeated.

    training.json   settings; at the end the exact matches of every test, held-out loss, entropies and speed
    metrics.jsonl   the training loss, each ten steps
    checkpoints/    weights and optimizer state
    model/          the model as a Hugging Face folder, if requested

Every value of `ClrsRecipe` changes the weights. A model is either a pretrained one, whose softmax is replaced in all
heads before fine-tuning, or a Llama of a given shape with random weights (`ClrsBase`). A pretrained model's new
normalizer starts as close to softmax as it can.

Steps go over groups of similar length, and the loss is on answers only. The examples of a step depend only on the seed
and the step, and checkpoints are atomic. So a resumed run continues exactly where it stopped. Optimizer and schedule
are those of the language model trainer.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from attnorm.files import atomic_replace, write_json
from attnorm.models.private_names import whole_windows
from attnorm.normalizers.spec import parse_spec
from attnorm.provenance import file_hash
from attnorm.run_folder import only_process
from attnorm_lab.training.checkpoints import (
    METRICS,
    OutOfTimeError,
    StopRequest,
    TrainingInterrupted,
    finished_checkpoints,
    speed_and_memory,
    step_of,
)
from attnorm_lab.training.clrs.data import (
    CHARACTERS,
    Characters,
    ClrsData,
    ClrsTokenizer,
    EncodedExample,
    Pretrained,
    groups_by_length,
    padded,
    step_indices,
)
from attnorm_lab.training.clrs.evaluate import (
    OWN,
    REFITTED,
    ClrsTests,
    Matches,
    answer_entropy,
    answer_logits,
    bits_by_cell,
    check_answers,
    fitted_coefficients,
    swap_for_test,
)
from attnorm_lab.training.device import accelerated, check_accelerate, chosen_device, machine
from attnorm_lab.training.lm.attention import (
    Attention,
    check_attention,
    compile_blocks,
    in_training,
    without_compiled_blocks,
)
from attnorm_lab.training.lm.model import (
    LMSettings,
    build_model,
    check_normalizer,
    count_parameters,
    learned_values,
)
from attnorm_lab.training.run import CHECKPOINTS, LARGEST_GRADIENT, RECORD, TrainingRun, make_optimizer, open_run

if TYPE_CHECKING:
    from accelerate import Accelerator

    from attnorm.models.load import LoadedModel

FROM_SCRATCH = "from-scratch"
MODEL = "model"
ClrsCallback = Callable[[str, int, int, dict[str, float] | None], None]
"""Called with the stage, how much of it is done, its total, and the log entry of training."""


@dataclass(frozen=True, kw_only=True)
class ClrsRecipe:
    """One training run; `layers`, `heads` and `width` are those of a model trained from scratch.

    Raises:
        ValueError: A value is out of range.
    """

    normalizer: str = "softmax"
    normalizer_options: dict[str, Any] = field(default_factory=dict)
    steps: int = 1000
    batch: int = 256
    """Questions per step."""
    learning_rate: float = 3e-4
    warmup: int = 50
    weight_decay: float = 0.1
    seed: int = 0
    dtype: str = "float32"
    tokens_at_once: int = 2**14
    """Padded tokens of one forward pass; a step has as many passes as it needs."""
    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 256
    """Training length for the normalizers that depend on one, in tokens: most questions are shorter."""

    def __post_init__(self) -> None:
        if self.tokens_at_once < 1:
            raise ValueError(f"tokens_at_once must be at least 1, got {self.tokens_at_once}")
        self.as_lm()  # checks the values that both have

    def as_lm(self) -> LMSettings:
        """Return the settings that the language model trainer's model, optimizer and schedule read."""
        return LMSettings(
            architecture="llama", layers=self.layers, heads=self.heads, width=self.width, context=self.context,
            vocab=CHARACTERS + 1, steps=self.steps, batch=self.batch, learning_rate=self.learning_rate,
            warmup=self.warmup, weight_decay=self.weight_decay, seed=self.seed, dtype=self.dtype,
            normalizer=self.normalizer, normalizer_options=self.normalizer_options,
        )  # fmt: skip

    def as_dict(self, *, pretrained: bool) -> dict[str, Any]:
        """Return the values that decide the weights."""
        unused = ("layers", "heads", "width") if pretrained else ()
        return {name: value for name, value in asdict(self).items() if name not in unused}


@dataclass(frozen=True)
class ClrsBase:
    """What training starts from: a pretrained model (a folder or a .gguf file), or None for random weights."""

    path: Path | None = None

    @property
    def name(self) -> str:
        return FROM_SCRATCH if self.path is None else self.path.name

    def identity(self) -> dict[str, str]:
        """Return the name and, of a pretrained model, the hash of its weights."""
        if self.path is None:
            return {"name": FROM_SCRATCH}
        return {"name": self.name, **_weight_hashes(self.path)}

    def tokenizer(self) -> ClrsTokenizer:
        """
        Raises:
            ValueError: The pretrained model has no tokenizer.
        """
        if self.path is None:
            return Characters()
        loaded = _loaded(self.path)
        if loaded.tokenizer is None:
            raise ValueError(
                f"expected a model with a tokenizer, got {self.path} without one ({loaded.tokenizer_problem}). Save "
                "the tokenizer in its folder."
            )
        return Pretrained(loaded.tokenizer)

    def build(self, recipe: ClrsRecipe, device: torch.device) -> Any:
        """Return the model in float32 with the recipe's normalizer in all heads.

        Raises:
            ValueError: The normalizer is unknown, has no such options, or does not fit the model.
        """
        if self.path is None:
            return build_model(recipe.as_lm(), CHARACTERS, 0).to(device)
        from attnorm.models.patch import patch

        pretrained: Any = _loaded(self.path).model
        model = copy.deepcopy(pretrained).to(device)
        if recipe.as_lm().patched:
            patch(model, recipe.normalizer, train_length=recipe.context, **recipe.normalizer_options)
        return model


@lru_cache(maxsize=1)
def _loaded(path: Path) -> "LoadedModel":
    """Load the model in float32 on the CPU; the models of a plan are copies of it."""
    from attnorm.models.load import load

    return load(path, dtype="float32", device="cpu")


@lru_cache(maxsize=1)
def _weight_hashes(path: Path) -> dict[str, str]:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"expected a model folder with safetensors or a .gguf file, got {path}")
    return {file.name: file_hash(file) for file in files}


def with_normalizer(recipe: ClrsRecipe, spec: str, options: dict[str, Any] | None = None) -> ClrsRecipe:
    """Return the recipe with a normalizer given as in topk:k=4; `options` are added."""
    name, spec_options = parse_spec(spec)
    return replace(recipe, normalizer=name, normalizer_options={**spec_options, **(options or {})})


def train_clrs(
    out: Path,
    base: ClrsBase,
    recipe: ClrsRecipe,
    data: ClrsData,
    tests: ClrsTests | None = None,
    *,
    device: str | None = None,
    attention: Attention = "engine",
    compiled: bool = False,
    checkpoint_every: int | None = None,
    deadline: float = math.inf,
    save_model: bool = False,
    report: ClrsCallback = lambda stage, done, total, entry: None,
) -> dict[str, Any]:
    """Train the model in `out`, or continue; return the record that training.json contains.

    Args:
        device: Default: a GPU if there is one.
        attention: How patched layers compute attention while training, as in `train_lm`.
        compiled: Compile the blocks, a few graphs for all lengths; the first steps take longer.
        checkpoint_every: Steps between checkpoints (default: only where training is stopped).
        deadline: As `time.monotonic` counts; training stops there.

    Raises:
        ImportError: accelerate is not installed.
        ValueError: Wrong settings, a folder with another run, or a loss that is not finite.
        OutOfTimeError: The deadline passed; the same call continues.
        TrainingInterrupted: Ctrl-C or SIGTERM; a checkpoint was written.
    """
    check_accelerate()
    tests = tests or ClrsTests()
    check_normalizer(recipe.as_lm())
    check_attention(attention, recipe.as_lm())
    torch_device = chosen_device(device)
    identity = {
        **recipe.as_dict(pretrained=base.path is not None), "base": base.identity(), "data": data.source,
        "tests": tests.as_dict(),
    }  # fmt: skip
    with only_process(out):
        record = open_run(out, identity, resume=True)
        if record["result"] and (not save_model or (out / MODEL).is_dir()):
            return record
        if record["result"] and recipe.steps not in map(step_of, finished_checkpoints(out / CHECKPOINTS)):
            raise ValueError(
                f"expected the checkpoint of step {recipe.steps} in {out / CHECKPOINTS}, to save the model of this "
                "finished run, got none. Train again in another folder with --save-model (save_model=True)."
            )
        with accelerated(torch_device, recipe.dtype) as accelerator, StopRequest() as stop:
            run = ClrsRun(out, base, recipe, data, accelerator, attention=attention, compiled=compiled)
            report("training", run.step, recipe.steps, None)
            for entry in run.steps(deadline, stop, checkpoint_every):
                report("training", run.step, recipe.steps, entry)
        if stop.requested:
            raise TrainingInterrupted(run.step)
        if run.step < recipe.steps:
            raise OutOfTimeError
        result = record["result"]
        if result is None:
            report("testing", 0, 1, None)
            result = {
                "steps": run.step, "tokens": run.tokens, "training_seconds": round(run.seconds, 1),
                **measure(run, tests),
                **speed_and_memory(out / METRICS), "learned": learned_values(run.model),
                "parameters": count_parameters(run.model),
                **machine(torch_device),
            }  # fmt: skip
        if save_model:
            from attnorm.models.saving import save_pretrained

            with atomic_replace(out / MODEL) as draft:
                save_pretrained(run.model, draft)
        if not record["result"]:
            write_json(out / RECORD, {**record, "result": result})
    return {**record, "result": result}


def measure(run: "ClrsRun", tests: ClrsTests) -> dict[str, Any]:
    """Return the held-out loss and, by test normalizer, exact matches (algorithm -> size -> bits) and entropies."""
    began = time.monotonic()
    model, recipe, data, device = run.model, run.recipe, run.data, run.device

    def answered(examples: Sequence[EncodedExample]) -> tuple[Matches, float]:
        with run.in_training():
            return check_answers(model, examples, device, recipe.dtype, recipe.tokens_at_once)

    matches, loss = answered(data.held_out)
    result: dict[str, Any] = {
        "held_out_loss": round(loss, 5) if math.isfinite(loss) else None,
        "held_out_exact": round(float(matches.mean()), 5),
    }
    if tests.test:
        with run.uncompiled():
            coefficients = fitted_coefficients(model, data.held_out, device) if REFITTED in tests.others else ()
        if coefficients:
            result["coefficients"] = list(coefficients)
        result["exact"], result["test_loss"], result["entropy"] = {}, {}, {}
        for name in (OWN, *tests.others):
            with swap_for_test(model, name, coefficients):
                test_matches, loss = answered(data.test)
                result["exact"][name] = bits_by_cell(data.test, test_matches)
                result["test_loss"][name] = round(loss, 5) if math.isfinite(loss) else None
                if tests.observed:
                    with run.uncompiled():
                        result["entropy"][name] = answer_entropy(model, data.test, tests.observed, device)
    return {**result, "test_seconds": round(time.monotonic() - began, 1)}


class ClrsRun(TrainingRun):
    """The training run of a CLRS-Text model."""

    def __init__(
        self, out: Path, base: ClrsBase, recipe: ClrsRecipe, data: ClrsData, accelerator: "Accelerator",
        *, attention: Attention = "engine", compiled: bool = False,
    ) -> None:  # fmt: skip
        self.recipe, self.data, self.accelerator = recipe, data, accelerator
        self.attention, self.compiled = attention, compiled
        model = base.build(recipe, accelerator.device)
        if compiled:
            if not hasattr(getattr(model, "model", None), "layers"):
                raise ValueError(
                    f"expected a model with blocks in model.layers to compile, got {type(model).__name__}. "
                    "Remove --compile (compiled=True)."
                )
            compile_blocks(model, recipe.as_lm(), any_length=True)
        out.mkdir(parents=True, exist_ok=True)
        optimizer = accelerator.prepare(make_optimizer(model, recipe))
        super().__init__(out, recipe, model, optimizer, accelerator.device)

    def steps(self, deadline: float, stop: StopRequest, checkpoint_every: int | None) -> Iterator[dict[str, float]]:
        """Train until the last step, the deadline or a request to stop; yield the log entries.

        checkpoint_every: steps between checkpoints; None for one only where training stops early.

        Raises:
            NotFiniteError: The loss is not finite.
        """
        with self.in_training():
            yield from self._logged_steps(deadline, stop, checkpoint_every=checkpoint_every, checkpoint_if_stopped=True)

    @contextmanager
    def in_training(self) -> Iterator[None]:
        """Set how attention is computed, in training and in the tests. No pass waits for the GPU."""
        recipe = self.recipe
        with (
            in_training(self.model, compiled=self.compiled, attention=self.attention, dtype=recipe.dtype),
            whole_windows(),
        ):
            yield

    def uncompiled(self) -> AbstractContextManager[None]:
        """Run the blocks without their graphs, to observe attention."""
        return without_compiled_blocks(self.model, self.recipe.as_lm()) if self.compiled else nullcontext()

    def _update(self, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        recipe, accelerator = self.recipe, self.accelerator
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = [self.data.train[i] for i in step_indices(len(self.data.train), recipe.batch, recipe.seed, self.step)]
        answer_tokens = sum(len(example.tokens) - example.answer_from for example in batch)
        total = torch.zeros((), device=accelerator.device)
        for indices in groups_by_length(batch, recipe.tokens_at_once):
            part = [batch[index] for index in indices]
            examples = padded(part).to(accelerator.device)
            with accelerator.autocast():
                logits = answer_logits(self.model, examples)
                # Every answer token of the step has the same weight, in whichever group it is.
                loss = F.cross_entropy(logits.float(), examples.targets, reduction="sum") / answer_tokens
            accelerator.backward(loss)
            total += loss.detach()
            self.tokens += sum(len(example.tokens) for example in part)
        norm = accelerator.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "tokens": self.tokens}
