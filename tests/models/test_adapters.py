"""Adapters of a patched model: PEFT saves them, and the normalizers with them."""

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import attnorm
from attnorm.models.patch import patch, unpatch
from attnorm.models.patch_state import patched_modules
from attnorm.models.saving import from_pretrained, save_pretrained
from tests.models.tiny import llama, quiet_logits, tokens

peft = pytest.importorskip("peft")

LORA = {"task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
MARKED = "attnorm: these adapters"


@pytest.fixture
def base(tmp_path: Path) -> PreTrainedModel:
    """Saved somewhere, so that adapters can name it."""
    llama().save_pretrained(tmp_path / "base")
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    return loaded


def adapted(model: PreTrainedModel, normalizer: Any = "ssmax") -> Any:
    """Patched after PEFT froze what it found, with parameters that no start value has."""
    with_adapters = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    handle = patch(with_adapters, normalizer)
    assert all(p.requires_grad for p in handle.parameters())
    with torch.no_grad():
        for parameter in handle.parameters():
            parameter.add_(0.3)
    return with_adapters


def said(model: Any) -> torch.Tensor:
    return quiet_logits(model.get_base_model() if hasattr(model, "get_base_model") else model, tokens())


def test_adapters_come_back_with_the_normalizers(base: PreTrainedModel, tmp_path: Path) -> None:
    model = adapted(base)
    model.save_pretrained(tmp_path / "adapters")
    assert not (tmp_path / "adapters" / "config.json").exists()
    loaded = from_pretrained(tmp_path / "adapters", model_class=AutoModelForCausalLM)
    assert torch.equal(said(loaded), said(model))
    with pytest.raises(ValueError, match="model_class="):
        from_pretrained(tmp_path / "adapters")


def test_a_plain_load_by_peft_warns_and_ours_does_not(
    base: PreTrainedModel, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model = adapted(base)
    model.save_pretrained(tmp_path / "adapters")
    recwarn.clear()
    from_pretrained(tmp_path / "adapters", model_class=AutoModelForCausalLM)
    assert not [one for one in recwarn if MARKED in str(one.message)]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with pytest.warns(UserWarning, match=f"{MARKED}.*Do not upgrade PEFT") as told:
        softmax = peft.PeftModel.from_pretrained(plain, tmp_path / "adapters")
    assert not torch.equal(said(softmax), said(model))
    call = re.search(r"Call (.*\)\)) instead", next(str(one.message) for one in told if MARKED in str(one.message)))
    assert call is not None
    restored = eval(call[1], {"attnorm": attnorm, "folder": tmp_path / "adapters", "base_model": plain})
    assert torch.equal(said(restored), said(model))


def test_a_process_without_attnorm_is_warned(base: PreTrainedModel, tmp_path: Path) -> None:
    adapted(base).save_pretrained(tmp_path / "adapters")
    script = "import sys, peft; peft.PeftConfig.from_pretrained(sys.argv[1]); assert 'attnorm' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "adapters")], capture_output=True, text=True, check=True
    )
    assert MARKED in done.stderr


def test_the_mark_is_gone_with_the_normalizer(base: PreTrainedModel, tmp_path: Path) -> None:
    model = adapted(base)
    model.save_pretrained(tmp_path / "adapters")
    config = tmp_path / "adapters" / "adapter_config.json"
    assert MARKED in config.read_text()
    unpatch(model)
    model.save_pretrained(tmp_path / "adapters")
    assert MARKED not in config.read_text()


def test_they_fit_the_base_model_before_peft_gets_it(base: PreTrainedModel, tmp_path: Path) -> None:
    model = adapted(base, "entmax15")
    model.save_pretrained(tmp_path / "adapters")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    attnorm.models.saving.restore_normalizers(plain, tmp_path / "adapters")
    assert torch.equal(said(peft.PeftModel.from_pretrained(plain, tmp_path / "adapters")), said(model))


def test_adapters_by_other_names_have_folders_of_their_own(base: PreTrainedModel, tmp_path: Path) -> None:
    model = adapted(base)
    model.add_adapter("second", peft.LoraConfig(**LORA))
    model.set_adapter("second")
    model.save_pretrained(tmp_path / "adapters")
    loaded = from_pretrained(tmp_path / "adapters" / "second", model_class=AutoModelForCausalLM)
    assert torch.equal(said(loaded), said(model))


def test_transformers_own_adapters_too(base: PreTrainedModel, tmp_path: Path) -> None:
    base.add_adapter(peft.LoraConfig(**LORA))
    patch(base, "ssmax")
    base.save_pretrained(tmp_path / "adapters")
    loaded = from_pretrained(tmp_path / "adapters", model_class=AutoModelForCausalLM)
    assert torch.equal(said(loaded), said(base))


def test_adapters_of_a_model_that_is_patched_no_more_hold_no_normalizers(base: PreTrainedModel, tmp_path: Path) -> None:
    model = adapted(base)
    model.save_pretrained(tmp_path / "adapters")
    unpatch(model)
    model.save_pretrained(tmp_path / "adapters")
    assert not [key for key in load_file(tmp_path / "adapters" / "adapter_model.safetensors") if "attnorm" in key]
    with pytest.raises(FileNotFoundError):
        from_pretrained(tmp_path / "adapters", model_class=AutoModelForCausalLM)


def test_a_model_that_was_patched_before_peft_got_it(base: PreTrainedModel, tmp_path: Path) -> None:
    """PEFT freezes the normalizer then, and saves it all the same."""
    patch(base, "ssmax")
    model = peft.get_peft_model(base, peft.LoraConfig(**LORA))
    model.save_pretrained(tmp_path / "adapters")
    assert MARKED in (tmp_path / "adapters" / "adapter_config.json").read_text()
    loaded = from_pretrained(tmp_path / "adapters", model_class=AutoModelForCausalLM)
    assert torch.equal(said(loaded), said(model))


def test_peft_s_own_functions_work_on_a_patched_model(base: PreTrainedModel, tmp_path: Path) -> None:
    model = adapted(base)
    expected = said(model)
    model.disable_adapter_layers()
    assert not torch.equal(said(model), expected)
    model.enable_adapter_layers()
    model.add_adapter("second", peft.LoraConfig(**LORA))
    model.set_adapter("second")
    model.set_adapter("default")
    model.delete_adapter("second")
    assert model.get_model_status().adapter_model_type == "LoraModel"
    assert torch.equal(said(copy.deepcopy(model)), said(model))
    torch.save(model, tmp_path / "model.pt")
    assert torch.equal(said(torch.load(tmp_path / "model.pt", weights_only=False)), said(model))
    assert torch.equal(said(model), expected)


def test_a_normalizer_without_a_name_is_named_when_it_is_loaded(base: PreTrainedModel, tmp_path: Path) -> None:
    model = adapted(base, attnorm.get("ssmax", heads=4))
    model.save_pretrained(tmp_path / "adapters")
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn.*name"):
        from_pretrained(tmp_path / "adapters", model_class=AutoModelForCausalLM)


def test_a_normalizer_that_peft_has_wrapped_is_refused(base: PreTrainedModel, tmp_path: Path) -> None:
    patch(base, "ssmax")
    model = peft.get_peft_model(base, peft.LoraConfig(**LORA, modules_to_save=["attnorm_normalizer"]))
    with pytest.raises(ValueError, match="modules_to_save"):
        attnorm.models.saving.check_savable(model)


def test_merged_adapters_are_an_ordinary_patched_model(base: PreTrainedModel, tmp_path: Path) -> None:
    model = adapted(base)
    with pytest.raises(TypeError, match="merge_and_unload"):
        save_pretrained(model, tmp_path / "merged")
    expected = said(model)
    merged = model.merge_and_unload()
    assert patched_modules(merged)
    save_pretrained(merged, tmp_path / "merged")
    torch.testing.assert_close(said(from_pretrained(tmp_path / "merged")), expected)
