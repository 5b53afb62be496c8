"""Every private name of torch, transformers, accelerate and Lightning that attnorm and attnorm_lab use.

Each is behind one function, and PRIVATE lists them with their purpose. tests/models/test_private_names.py checks each
one, so that a new version of a library that lacks a name fails there, with that name, and not somewhere in a
measurement. Engines and metrics are below this package: they call private operators of torch where they need them.
Large modules are imported where they are used: this file is imported by most others.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

INTERFACE, GET_INTERFACE = "ALL_ATTENTION_FUNCTIONS", "get_interface"
ROTARY_FUNCTION = "apply_rotary_pos_emb"
COMPILED_PREFIX = "_orig_mod."
# The kernels that are part of transformers. Every other name may be a repository, whose code would be fetched and run.
OWN_KERNELS = {
    "_attn_implementation": (None, "eager", "sdpa", "flex_attention"),
    "_experts_implementation": (None, "eager", "batched_mm", "grouped_mm"),
}
IGNORED_KEYS = "_keys_to_ignore_on_load_unexpected"

PRIVATE: dict[str, str] = {
    "torch._C._current_graph_task_id": "a layer that gradient checkpointing runs again is no new call",
    "torch._dynamo.OptimizedModule": "a compiled model runs uncompiled while it is observed",
    "torch.nn.Module._compiled_call_impl": "the same, for module.compile(), and to run compiled blocks uncompiled",
    "torch._native_multi_head_attention": "the fast path of nn.MultiheadAttention",
    "torch._transformer_encoder_layer_fwd": "the fast path of nn.TransformerEncoderLayer",
    "torch._higher_order_ops.flex_attention.flex_attention": "the operator that flex_attention calls",
    "torch.nn.attention.flex_attention._identity": "the score_mod of a call that gives none",
    "torch.overrides._get_current_function_mode_stack": "whether attnorm's mode is the only one",
    "torch.overrides._pop_mode_temporarily": "to ask for fast paths as if attnorm's mode were not active",
    "transformers.AttentionInterface.get_interface": "where every attention module asks for its kernel",
    f"transformers.models.llama.modeling_llama.{INTERFACE}": "the name in its code shows a module that asks",
    f"transformers.models.llama.modeling_llama.{ROTARY_FUNCTION}": "queries and keys before their rotation",
    f"transformers.PreTrainedModel.{IGNORED_KEYS}": "the normalizers' weights are expected by attnorm",
    "transformers.PreTrainedConfig._attn_implementation": "the kernel that a model builds its masks for",
    "transformers.PreTrainedConfig._attn_implementation_internal": "the kernel of a patched module alone",
    "transformers.PreTrainedConfig._experts_implementation": "a kernel that a config may name and the hub may have",
    "transformers.PreTrainedConfig._experts_implementation_internal": "the same, of one part of a model",
    "transformers.PreTrainedConfig._name_or_path": "where a model was loaded from",
    "transformers.masking_utils.find_packed_sequence_indices": "whole windows need no search, which waits for the GPU",
    "transformers.masking_utils.is_tracing": "a step that a CUDA graph captures has no mask as a tensor",
    "transformers.utils.hub.cached_file(_raise_exceptions_for_missing_entries)": "a file that may be absent",
    "transformers.utils.hub.cached_file(_raise_exceptions_for_connection_errors)": "the same, without a network",
    "transformers.PreTrainedModel._tp_size": "a model of which each process holds a part of the heads",
    "accelerate.hooks.add_hook_to_module -> _hf_hook": "the device of weights that accelerate offloads",
    "accelerate.state.AcceleratorState._shared_state": "one process trains several models, each with its own state",
    "accelerate.state.GradientState._shared_state": "the same",
    "accelerate.state.PartialState._shared_state": "the same",
    "lightning.pytorch.loops.training_epoch_loop -> _batches_that_stepped": "the step under which a batch is logged",
}

fast_multi_head_attention = torch._native_multi_head_attention
fast_encoder_layer = torch._transformer_encoder_layer_fwd


def flex_operator() -> Any:
    from torch._higher_order_ops.flex_attention import flex_attention

    return flex_attention


def in_backward_pass() -> bool:
    return torch._C._current_graph_task_id() != -1


def is_compiled(module: nn.Module) -> bool:
    return isinstance(module, torch._dynamo.OptimizedModule) or bool(module._compiled_call_impl)


def replace_compiled_call(module: nn.Module, call: Any) -> Any:
    """Replace what module.compile() made by `call`, or by None to run uncompiled; return the previous one."""
    previous = module._compiled_call_impl
    module._compiled_call_impl = call
    return previous


def uncompiled(model: Any) -> Any:
    """The model inside torch.compile's wrapper, or the model itself."""
    return getattr(model, COMPILED_PREFIX.rstrip("."), model)


def function_modes() -> list[Any]:
    return list(torch.overrides._get_current_function_mode_stack())


def without_innermost_mode() -> AbstractContextManager[Any]:
    return torch.overrides._pop_mode_temporarily()


def is_identity_score_mod(score_mod: Any) -> bool:
    full_name = getattr(score_mod, "__module__", ""), getattr(score_mod, "__name__", "")
    return full_name == ("torch.nn.attention.flex_attention", "_identity")


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether each process holds a part of the heads, by transformers' tp_plan or torch's parallelize_module."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    parts = list(model.modules())
    if any((getattr(part, "_tp_size", None) or 1) > 1 for part in parts):
        return True
    gathered = any(isinstance(part, FSDPModule) for part in parts)  # FSDP collects its weights for every forward
    return not gathered and any(isinstance(weight, DTensor) for weight in model.parameters())


def is_context_parallel() -> bool:
    """Whether torch's context_parallel() is active: it replaces scaled_dot_product_attention."""
    attention = torch.nn.functional.scaled_dot_product_attention
    return (getattr(attention, "__module__", "") or "").startswith("torch.distributed.")


def replace_get_interface(function: Any) -> Any:
    """Replace AttentionInterface.get_interface by `function`; return the previous one."""
    from transformers import AttentionInterface

    original = AttentionInterface.get_interface
    AttentionInterface.get_interface = function  # type: ignore[method-assign]
    return original


def kernel_name(config: Any) -> str:
    """Name of the attention function that a model with this config runs and builds masks for."""
    return config._attn_implementation or "eager"


def remove_foreign_kernels(config: Any) -> list[str]:
    """Leave the choice of kernels to transformers where a config names foreign ones; return their names."""
    removed = []
    for attribute, own in OWN_KERNELS.items():
        if (name := getattr(config, attribute, None)) not in own:
            removed.append(str(name))
            setattr(config, f"{attribute}_internal", None)
    parts = [getattr(config, key, None) for key in getattr(config, "sub_configs", {})]
    return removed + [name for part in parts if part is not None for name in remove_foreign_kernels(part)]


def copy_with_kernel(config: Any, kernel: str) -> Any:
    """A copy of the config that names another kernel; sub-configs are shared and keep theirs."""
    copied = copy.copy(config)
    copied._attn_implementation_internal = kernel
    return copied


def loaded_from(config: Any) -> str:
    return str(getattr(config, "_name_or_path", "") or "")


def commit_hash(config: Any) -> str | None:
    """The hub commit of a loaded model; None also in versions of transformers that do not keep it (5.22)."""
    return getattr(config, "_commit_hash", None)


def rotary_files(modules: list[nn.Module]) -> dict[ModuleType, Any]:
    """The source files of these modules that define a rotation, each with its function."""
    files = {sys.modules[type(module).__module__] for module in modules}
    return {file: getattr(file, ROTARY_FUNCTION) for file in files if hasattr(file, ROTARY_FUNCTION)}


def offload_devices(module: nn.Module) -> list[torch.device]:
    """Return the devices on which parts of the module compute whose weights accelerate offloads."""
    hooks = [getattr(part, "_hf_hook", None) for part in module.modules()]
    devices = [getattr(hook, "execution_device", None) for hook in hooks]
    return [torch.device(device) for device in devices if device is not None]


def accelerate_states() -> list[dict[str, Any]]:
    """The global state of accelerate, which has no public way to reset it, not even for the Trainer of transformers."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    return [kind._shared_state for kind in (AcceleratorState, GradientState, PartialState)]


def lightning_step(trainer: Any) -> int:
    """Return the current step, counted from 0 as Lightning does: attention and the loss of a batch share a step.

    Not global_step, which increases by two where two optimizers step. Lightning's callbacks read the same attribute.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def find_file(directory: Any, name: str, **where: Any) -> Path | None:
    """A file of a folder or of a hub repository; None if it is absent, or not cached and the hub cannot be reached."""
    from transformers.utils.hub import cached_file

    path = cached_file(
        directory,
        name,
        **where,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if path is None else Path(path)


@contextmanager
def expecting_weights(model_class: Any, pattern: str) -> Iterator[None]:
    """Inside the block, from_pretrained of this class does not report weights that match the pattern as unexpected."""
    if not hasattr(model_class, IGNORED_KEYS):  # an Auto class
        yield
        return
    inherits = IGNORED_KEYS not in vars(model_class)
    before = getattr(model_class, IGNORED_KEYS)
    setattr(model_class, IGNORED_KEYS, [*(before or []), pattern])
    try:
        yield
    finally:
        if inherits:
            delattr(model_class, IGNORED_KEYS)
        else:
            setattr(model_class, IGNORED_KEYS, before)


@contextmanager
def whole_windows() -> Iterator[None]:
    """Let models of transformers take every sequence as one text without padding, whose mask is causal.

    Otherwise they wait for the GPU in every step, to find out whether several texts are packed into one sequence. And
    while a graph is captured they would build the mask as a tensor.
    """
    from transformers import masking_utils

    masks: Any = masking_utils
    own = masks.find_packed_sequence_indices, masks.is_tracing
    masks.find_packed_sequence_indices, masks.is_tracing = lambda position_ids: None, lambda tensor=None: False
    try:
        yield
    finally:
        masks.find_packed_sequence_indices, masks.is_tracing = own
