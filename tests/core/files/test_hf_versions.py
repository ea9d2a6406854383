"""What the files of a model and a tokenizer say to both lines of ``transformers``; this line reads the same.

``tests/hub/test_other_versions.py`` opens such files in version 4.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    ModernBertConfig,
    ModernBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from mlsm_plugin.core.files.hf_files import save_pretrained
from tests.tiny_hf_models import make_tokenizer
from tests.tiny_models import TinyData

GLOBAL, LOCAL = "full_attention", "sliding_attention"
SIZES = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "pad_token_id": 0}


def angles(of_global: dict[str, Any], of_local: float) -> dict[str, Any]:
    plain = {"rope_type": "default"}
    return {"rope_parameters": {GLOBAL: plain | of_global, LOCAL: plain | {"rope_theta": of_local}}}


def modernbert(**settings: Any) -> Any:
    special = {f"{role}_token_id": number for number, role in enumerate(("bos", "eos", "cls", "sep"))}
    torch.manual_seed(1)
    return ModernBertForMaskedLM(ModernBertConfig(**SIZES, **special, num_hidden_layers=4, **settings)).eval()


def read(folder: Path, name: str = "config.json") -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [3, 160_000, 10_000]),
        (angles({"rope_theta": 20_000.0}, 500.0), [3, 20_000, 500]),
        ({"layer_types": [GLOBAL, LOCAL] * 2}, [2, 160_000, 10_000]),
        ({"layer_types": [GLOBAL] * 4}, [1, 160_000, 10_000]),
        # what version 4 cannot compute, it cannot open
        ({"layer_types": [LOCAL, GLOBAL, GLOBAL, LOCAL]}, [None, 160_000, 10_000]),
        (angles({"rope_theta": 20_000.0, "rope_type": "linear", "factor": 2.0}, 500.0), [3, None, 500]),
    ],
    ids=["published", "other angles", "every second", "all global", "no order", "scaled"],
)
def test_layers_and_angles_of_modernbert_are_said_in_both_ways(
    settings: dict[str, Any], expected: list[Any], tmp_path: Path
) -> None:
    model = modernbert(**settings)
    save_pretrained(tmp_path / "one", model)
    for number in range(2):  # the second is what this version makes of what it has read
        folder = tmp_path / ("one", "two")[number]
        config = read(folder)
        names = ("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta")
        assert [config[name] for name in names] == expected
        assert config["layer_types"] == model.config.layer_types
        assert config["rope_parameters"] == model.config.rope_parameters
        again = AutoModelForMaskedLM.from_pretrained(folder).eval()
        ids = torch.arange(5, 25)[None]
        torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=0)
        save_pretrained(tmp_path / "two", again)


def test_the_type_of_the_weights_has_the_names_of_both(tmp_path: Path) -> None:
    save_pretrained(tmp_path, AutoModelForMaskedLM.from_config(RobertaConfig(**SIZES, num_hidden_layers=1)).bfloat16())
    assert (read(tmp_path)["dtype"], read(tmp_path)["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert AutoModelForMaskedLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_the_bias_of_a_head_has_both_of_its_names(tmp_path: Path) -> None:
    model = RobertaForMaskedLM(RobertaConfig(**SIZES, num_hidden_layers=1))
    torch.nn.init.normal_(model.lm_head.bias)
    save_pretrained(tmp_path, model)
    weights = load_file(tmp_path / "model.safetensors")
    for name in ("lm_head.bias", "lm_head.decoder.bias"):
        torch.testing.assert_close(weights[name], model.lm_head.bias.detach(), rtol=0, atol=0)
    assert model.lm_head.decoder.bias is model.lm_head.bias
    again, info = AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert (set(info["missing_keys"]), set(info["unexpected_keys"])) == (set(), set())
    torch.testing.assert_close(again.lm_head.decoder.bias, model.lm_head.bias, rtol=0, atol=0)


def test_a_tokenizer_has_a_class_inputs_and_tokens_that_both_know(tiny: TinyData, tmp_path: Path) -> None:
    tokenizer = make_tokenizer("byte_level", tiny.text, tmp_path / "own")
    tokenizer.add_special_tokens({"additional_special_tokens": ["[EXTRA]"]})
    save_pretrained(tmp_path / "written", tokenizer)
    config = read(tmp_path / "written", "tokenizer_config.json")
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["model_input_names"] == ["input_ids", "attention_mask"]
    assert config["additional_special_tokens"] == ["[EXTRA]"]
    assert "extra_special_tokens" not in config  # version 4 wants another type
    again = AutoTokenizer.from_pretrained(tmp_path / "written")
    text = "The name [EXTRA] is <mask>."
    assert dict(again(text)) == dict(tokenizer(text))
    assert again.all_special_tokens == tokenizer.all_special_tokens


def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        save_pretrained(tmp_path / "file" / "below", modernbert())
