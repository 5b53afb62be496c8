"""Save the normalizers of a patched model together with its PEFT adapters.

PEFT saves the weights of adapters, and for every AuxiliaryTrainingWrapper the result of its `adapter_state_dict`. If
PEFT is installed, the recipe of a patched module is such a wrapper, so recipe and values are in
adapter_model.safetensors. If PEFT loads the adapters without attnorm, it ignores them. To get a warning there, we add a
key that PEFT does not know to the configuration of the adapters: PEFT prints its name, and then advises to upgrade
PEFT. Hence the name is a sentence that contradicts this advice.
"""

import types
import weakref
from collections.abc import Mapping
from typing import Any

from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from attnorm.models.recipe import Recipe, SavedRecipe

MARK = (
    "attnorm: these adapters belong to a model without softmax, which PEFT does not restore in any version. Do not "
    "upgrade PEFT for it. Call attnorm.from_pretrained(folder, model_class=type(base_model)) instead"
)


class AdapterRecipe(SavedRecipe, AuxiliaryTrainingWrapper):  # type: ignore[misc, unused-ignore]
    """A recipe that PEFT saves with every adapter of the model, together with the values of the normalizer."""

    __getattr__ = nn.Module.__getattr__  # not of a wrapped module: there is none

    def __init__(self, recipe: Recipe, configs: tuple[Any, ...], normalizer: nn.Module, model: nn.Module) -> None:
        super().__init__(recipe, configs)
        self._active_adapter: list[str] = []
        self._disable_adapters = False
        self._adapters: set[str] = set()
        self.__dict__["normalizer"] = normalizer  # not as a submodule: the attention module holds it
        self.model = weakref.ref(model)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "model": None}  # a weak reference cannot be pickled

    def adapter_state_dict(self, adapter_name: str, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        model = None if self.model is None else self.model()
        config = getattr(model, "peft_config", {}).get(adapter_name)
        if config is not None:
            config.to_dict = types.MethodType(to_dict, config)
        values = {f"values.{key}": value.detach() for key, value in self.normalizer.state_dict().items()}
        return {"json": state_dict["json"], **values}

    def adapter_state_dict_load_map(self, adapter_name: str) -> dict[str, str]:
        return {}

    def _get_available_adapters(self) -> set[str]:
        return set()

    def check_set_adapter(self, adapter_name: str | list[str]) -> str | None:
        return None

    def delete_adapter(self, adapter_name: str, new_active_adapters: list[str] | None) -> None:
        pass

    def unload_and_optionally_merge_module(self, *_: Any, **__: Any) -> nn.Module:
        return self


def to_dict(config: Any) -> dict[str, Any]:
    """Return the adapters' configuration with the additional key, which is set again at every save."""
    vars(config).pop("to_dict", None)
    return {**config.to_dict(), MARK: "recipe and values are in the adapter weights"}
