"""Adapters of a patched model: PEFT saves them alone, and the normalizers must not be lost beside them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import attnorm
from attnorm.models.patch import patch, unpatch
from attnorm.models.patch_state import patched_modules
from attnorm.models.saving import ADAPTER_MARK, from_pretrained, save_pretrained
from tests.models.tiny import llama, quiet_logits, tokens

peft = pytest.importorskip("peft")

LORA = {"task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
TOLD = r"adapters of a model whose softmax was replaced: load it with attnorm.from_pretrained\(..., model_class="


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
    with pytest.warns(UserWarning, match=TOLD):
        model.save_pretrained(tmp_path / "adapters")
    assert not (tmp_path / "adapters" / "config.json").exists()
    loaded = from_pretrained(tmp_path / "adapters", model_class=AutoModelForCausalLM)
    assert torch.equal(said(loaded), said(model))
    with pytest.raises(ValueError, match=r"holds adapters and not the model.*model_class="):
        from_pretrained(tmp_path / "adapters")


def test_a_plain_load_by_peft_warns_and_ours_does_not(
    base: PreTrainedModel, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model = adapted(base)
    model.save_pretrained(tmp_path / "adapters")
    recwarn.clear()
    from_pretrained(tmp_path / "adapters", model_class=AutoModelForCausalLM)
    assert not [one for one in recwarn if ADAPTER_MARK in str(one.message)]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with pytest.warns(UserWarning, match=ADAPTER_MARK):
        softmax = peft.PeftModel.from_pretrained(plain, tmp_path / "adapters")
    assert not torch.equal(said(softmax), said(model))


def test_a_process_without_attnorm_is_warned(base: PreTrainedModel, tmp_path: Path) -> None:
    adapted(base).save_pretrained(tmp_path / "adapters")
    script = "import sys, peft; peft.PeftConfig.from_pretrained(sys.argv[1]); assert 'attnorm' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "adapters")], capture_output=True, text=True, check=True
    )
    assert ADAPTER_MARK in done.stderr


def test_the_mark_is_gone_with_the_normalizer(base: PreTrainedModel, tmp_path: Path) -> None:
    model = adapted(base)
    model.save_pretrained(tmp_path / "adapters")
    config = tmp_path / "adapters" / "adapter_config.json"
    assert json.loads(config.read_text())[ADAPTER_MARK] == "attnorm.json"
    unpatch(model)
    model.save_pretrained(tmp_path / "adapters")
    assert ADAPTER_MARK not in json.loads(config.read_text())


def test_they_fit_the_base_model_before_peft_gets_it(base: PreTrainedModel, tmp_path: Path) -> None:
    model = adapted(base, "entmax15")
    with pytest.warns(UserWarning, match=TOLD):
        model.save_pretrained(tmp_path / "adapters")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    attnorm.models.saving.restore_normalizers(plain, tmp_path / "adapters")
    assert torch.equal(said(peft.PeftModel.from_pretrained(plain, tmp_path / "adapters")), said(model))


def test_adapters_by_other_names_have_folders_of_their_own(base: PreTrainedModel, tmp_path: Path) -> None:
    model = adapted(base)
    model.add_adapter("second", peft.LoraConfig(**LORA))
    model.set_adapter("second")
    with pytest.warns(UserWarning, match=TOLD):
        model.save_pretrained(tmp_path / "adapters")
    loaded = from_pretrained(tmp_path / "adapters" / "second", model_class=AutoModelForCausalLM)
    assert torch.equal(said(loaded), said(model))


def test_transformers_own_adapters_too(base: PreTrainedModel, tmp_path: Path) -> None:
    base.add_adapter(peft.LoraConfig(**LORA))
    patch(base, "ssmax")
    with pytest.warns(UserWarning, match=TOLD):
        base.save_pretrained(tmp_path / "adapters")
    loaded = from_pretrained(tmp_path / "adapters", model_class=AutoModelForCausalLM)
    assert torch.equal(said(loaded), said(base))


def test_adapters_of_a_model_that_is_patched_no_more_leave_no_files(base: PreTrainedModel, tmp_path: Path) -> None:
    model = adapted(base)
    with pytest.warns(UserWarning, match=TOLD):
        model.save_pretrained(tmp_path / "adapters")
    unpatch(model)
    model.save_pretrained(tmp_path / "adapters")
    assert not list((tmp_path / "adapters").glob("attnorm*"))


def test_other_adapters_in_the_folder_are_refused(base: PreTrainedModel, tmp_path: Path) -> None:
    model = adapted(base)
    with pytest.warns(UserWarning, match=TOLD):
        model.save_pretrained(tmp_path / "adapters")
    recipe = (tmp_path / "adapters" / "attnorm.json").read_text()
    assert [*json.loads(recipe)["weights"]] == ["adapter_model.safetensors"]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.add_(1.0)
    unpatch(model)
    model.save_pretrained(tmp_path / "adapters")
    (tmp_path / "adapters" / "attnorm.json").write_text(recipe)  # as a process without attnorm would leave it
    with pytest.raises(ValueError, match="written with other weights"):
        from_pretrained(tmp_path / "adapters", model_class=AutoModelForCausalLM)


def test_a_normalizer_without_a_name_is_told(base: PreTrainedModel, tmp_path: Path) -> None:
    model = adapted(base, attnorm.get("ssmax", heads=4))
    with pytest.warns(UserWarning, match=r"the normalizer was not saved: .*given as an object"):
        model.save_pretrained(tmp_path / "adapters")
    assert not list((tmp_path / "adapters").glob("attnorm*"))


def test_a_normalizer_that_peft_has_wrapped_is_told(base: PreTrainedModel, tmp_path: Path) -> None:
    patch(base, "ssmax")
    model = peft.get_peft_model(base, peft.LoraConfig(**LORA, modules_to_save=["attnorm_normalizer"]))
    with pytest.warns(UserWarning, match="leave 'attnorm_normalizer' out of modules_to_save"):
        model.save_pretrained(tmp_path / "adapters")


def test_merged_adapters_are_an_ordinary_patched_model(base: PreTrainedModel, tmp_path: Path) -> None:
    model = adapted(base)
    with pytest.raises(TypeError, match="merge the adapters first"):
        save_pretrained(model, tmp_path / "merged")
    expected = said(model)
    merged = model.merge_and_unload()
    assert patched_modules(merged)
    save_pretrained(merged, tmp_path / "merged")
    torch.testing.assert_close(said(from_pretrained(tmp_path / "merged")), expected)
