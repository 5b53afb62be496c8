"""The mark in the configuration of adapters, which needs no PEFT to be written: it stays as long as the normalizer."""

import json
from pathlib import Path

from attnorm.models.patch import patch, unpatch
from attnorm.models.saving import ADAPTER_MARK, recipes_of, write_normalizers
from tests.models.tiny import llama


def test_the_configuration_of_adapters_is_marked_while_the_softmax_is_replaced(tmp_path: Path) -> None:
    config = tmp_path / "adapter_config.json"
    plain = {"peft_type": "LORA", "r": 2}
    config.write_text(json.dumps(plain))
    model = llama()
    patch(model, "ssmax")
    write_normalizers(tmp_path, model, recipes_of(model), {})
    assert json.loads(config.read_text()) == {**plain, ADAPTER_MARK: "attnorm.json"}
    unpatch(model)
    write_normalizers(tmp_path, model, recipes_of(model), {})
    assert json.loads(config.read_text()) == plain
    assert not (tmp_path / "attnorm.json").exists()
