"""A private name that a new version of a library lacks is reported here by that name."""

import ast
import contextlib
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, PreTrainedConfig

from attnorm.models import private_names
from attnorm.models.private_names import (
    PRIVATE,
    in_backward_pass,
    is_compiled,
    is_identity_score_mod,
    loaded_from,
    replace_compiled_call,
    uncompiled,
    whole_windows,
)
from tests.models.families import tiny

PACKAGE = Path(private_names.__file__).parent.parent
ROOMS = [PACKAGE / name for name in ("models", "training", "monitor")]


def resolve(name: str) -> Any:
    """The object that a dotted name stands for; AttributeError says which part of it is gone."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


@pytest.mark.parametrize("name", PRIVATE)
def test_the_installed_libraries_have(name: str) -> None:
    pytest.importorskip(name.split(".")[0])
    if name.startswith("lightning."):  # an attribute of instances
        file, attribute = name.split(" -> ")
        assert f"self.{attribute}" in source_of(importlib.import_module(file)), name
        return
    if " -> " in name:
        hooks = pytest.importorskip("accelerate.hooks")
        module = hooks.add_hook_to_module(nn.Linear(1, 1), hooks.ModelHook())
        assert hasattr(module, name.split(" -> ")[1]), name
        return
    if name.startswith("transformers.PreTrainedConfig."):  # attributes that instances have, one only from the hub
        attribute = name.rsplit(".", 1)[1]
        assert hasattr(LlamaConfig(), attribute) or f".{attribute}" in source_of(PreTrainedConfig), name
        return
    called = re.fullmatch(r"(.*)\((\w+)\)", name)
    try:
        found = resolve(called[1] if called else name)
    except AttributeError as error:
        pytest.fail(f"{name} is gone: {error}. Used for: {PRIVATE[name]}")
    if called is not None:
        parameters = inspect.signature(found).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        assert called[2] in parameters or (takes_any and called[2] in source_of(found)), name


def source_of(thing: Any) -> str:
    """The file that defines it: where options are passed on, their names must occur in it."""
    return Path(inspect.getsourcefile(thing) or "").read_text(encoding="utf-8")


def test_private_names_mean_what_they_should() -> None:
    assert not in_backward_pass()
    seen = []
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda gradient: seen.append(in_backward_pass()))
    (weight * 2).sum().backward()
    assert seen == [True]
    linear = nn.Linear(1, 1)
    assert not is_compiled(linear)
    assert is_compiled(torch.compile(linear))
    assert uncompiled(torch.compile(linear)) is linear
    linear.compile()
    assert is_compiled(linear)
    compiled = replace_compiled_call(linear, None)
    assert not is_compiled(linear)
    assert replace_compiled_call(linear, compiled) is None
    assert is_compiled(linear)
    from torch.nn.attention import flex_attention

    assert is_identity_score_mod(flex_attention._identity)
    assert not is_identity_score_mod(lambda score, b, h, q, k: score)


def test_no_other_file_of_these_packages_touches_a_private_name() -> None:
    own = {"torch", "transformers", "accelerate", "config", "model", "module", "hook", "block", "kind", "trainer"}
    dynamo_options = "torch._dynamo.config.patch"  # documented, and without another name
    found = []
    for path in sorted(path for room in ROOMS for path in room.rglob("*.py")):
        if path.name == "private_names.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8").replace(dynamo_options, "dynamo_options"))):
            private = isinstance(node, ast.Attribute) and re.fullmatch(r"_[a-z]\w*", node.attr)
            if private and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}):
                root = ast.unparse(node.value).split(".")[0].split("(")[0]
                found += [f"{path.name}: {ast.unparse(node)}"] if root in own else []
            if isinstance(node, ast.ImportFrom) and re.search(r"\._", f".{node.module}"):
                found.append(f"{path.name}: {node.module}")
    assert found == []


def test_a_config_names_where_it_was_loaded_from() -> None:
    config = LlamaConfig(num_hidden_layers=1)
    assert loaded_from(config) == ""
    config.name_or_path = "models/small"  # as from_pretrained of a model does
    assert loaded_from(config) == "models/small"


class NumbersRead(TorchDispatchMode):
    """Counts the numbers that Python reads from a tensor: on a GPU each waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_models_read_no_number_from_whole_windows() -> None:
    model, windows = tiny("llama").train(), torch.arange(16).view(2, 8)
    outputs = []
    for inside in (False, True, False):
        with whole_windows() if inside else contextlib.nullcontext(), NumbersRead() as read:
            outputs.append(model(windows, use_cache=False).logits)
        assert (read.count == 0) == inside
    assert torch.equal(outputs[0], outputs[1])
    with pytest.raises(KeyError), whole_windows():
        raise KeyError
    with NumbersRead() as read:
        model(windows, use_cache=False)
    assert read.count > 0
