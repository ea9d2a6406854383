"""Checkpoints of somebody who wants their own code to run: what is changed in a good one, and what a user must get."""

from __future__ import annotations

import os
import pickle
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

State = dict[str, Any]


@dataclass(frozen=True)
class Attack:
    """A change of what a checkpoint holds.

    ``change`` gets the state and text that, evaluated as Python, makes a file. ``error`` is what the error must say;
    None: the checkpoint loads, and what it asks for is ignored.
    """

    change: Callable[[State, str], object]
    error: str | None


def model(name: str, *options: str, **values: object) -> Callable[[State, str], object]:
    """Another architecture, whose ``options`` are code; also as checkpoints before fairseq 0.11 say it, see below."""

    def change(state: State, code: str) -> None:
        own = vars(state["cfg"]["model"])
        own |= {"_name": name, "arch": name, **dict.fromkeys(options, code), **values}

    return change


def part(kind: str, **values: object) -> Callable[[State, str], object]:
    """Other options in a part of the configuration; CODE stands for the code."""

    def change(state: State, code: str) -> None:
        own = state["cfg"][kind]
        for name, value in values.items():
            value = code if value == CODE else value
            options = vars(own) if isinstance(own, Namespace) else own
            options[name] = value

    return change


def as_before_fairseq_11(state: State, code: str) -> None:
    """All options in one namespace, which fairseq turns into a configuration."""
    cfg = state["cfg"]
    args = vars(cfg["model"]) | {"task": "masked_lm", "criterion": "masked_lm", "arch": "fconv", "encoder_layers": code}
    state.update({"cfg": None, "args": Namespace(**args)})


def nested(state: State, code: str) -> None:
    value: Any = 1
    for _ in range(200):
        value = [value]
    state["cfg"]["common"]["user_dir"] = value


class RunsCode:
    """An object whose loading runs code."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> Any:
        return eval, (self.code,)


CODE = "CODE"
LISTED = "which is not on the list of what checkpoints may name"
RUNS = "which fairseq would run"
FIT = "its weights do not fit"
TYPE = "of another type"
UNREADABLE = "is not a readable fairseq checkpoint"

ATTACKS = {
    "fconv": Attack(model("fconv", "encoder_layers", "decoder_layers", "decoder_attention"), LISTED),
    "fconv_lm": Attack(model("fconv_lm", "decoder_layers", "decoder_attention"), LISTED),
    "fconv_self_att": Attack(model("fconv_self_att", "pretrained", "encoder_attention"), LISTED),
    "lightconv_lm": Attack(model("lightconv_lm", "character_filters", character_embeddings=True), LISTED),
    "lstm": Attack(model("lstm", "decoder_attention"), LISTED),
    "transformer_lm": Attack(model("transformer_lm", "character_filters", character_embeddings=True), LISTED),
    "wav2vec2": Attack(model("wav2vec2", "conv_feature_layers"), LISTED),
    "no architecture": Attack(part("model", _name=None), LISTED),
    "an architecture that is a list": Attack(part("model", _name=["roberta"]), LISTED),
    "no model": Attack(lambda state, code: state["cfg"].pop("model"), LISTED),
    "task that calls a program": Attack(part("task", _name="audio_finetuning", post_save_script=CODE), LISTED),
    "task that evaluates": Attack(part("task", _name="multilingual_translation", left_pad_source=CODE), LISTED),
    "criterion that evaluates": Attack(part("criterion", _name="ctc", wer_args=CODE), LISTED),
    "before fairseq 0.11": Attack(as_before_fairseq_11, LISTED),
    "attention options": Attack(part("model", xformers_att_config=CODE), RUNS),
    "attention options of the encoder": Attack(part("model", encoder_xformers_att_config=CODE), RUNS),
    "softmax options": Attack(part("model", adaptive_softmax_cutoff=CODE), RUNS),
    "interpolation": Attack(part("task", data="${oc.env:HOME}"), "interpolations in a checkpoint are never resolved"),
    "escaped quote": Attack(
        lambda state, code: state.update({"cfg": None, "args": Namespace(data="a\\', b=1")}), "escaped quote"
    ),
    "object": Attack(lambda state, code: state.update({"task_state": RunsCode(code)}), "holds Python objects"),
    "object in the options": Attack(
        lambda state, code: part("common", user_dir=RunsCode(code))(state, code), "holds Python objects"
    ),
    "meter": Attack(
        lambda state, code: state["extra_state"].update({"metrics": {"default": [(0, "x", "type_as", {})]}}), UNREADABLE
    ),
    "tensor for an option": Attack(part("common", seed=torch.ones(2)), "not plain data"),
    "deep nesting": Attack(nested, "nested too deeply"),
    "text for a number": Attack(part("model", encoder_layers=CODE), TYPE),
    "number for text": Attack(part("model", activation_fn=3), TYPE),
    "text for a number of the task": Attack(part("task", tokens_per_sample=CODE), TYPE),
    "a billion layers": Attack(part("model", encoder_layers=10**9), FIT),
    "a billion dimensions": Attack(part("model", encoder_ffn_embed_dim=10**9), FIT),
    "a billion positions": Attack(part("model", max_positions=10**9), FIT),
    "weight that is text": Attack(lambda state, code: state["model"].update({"encoder.x": code}), UNREADABLE),
    "weights that are a list": Attack(lambda state, code: state.update({"model": [1]}), UNREADABLE),
    "updates that are text": Attack(
        lambda state, code: state["optimizer_history"][-1].update({"num_updates": code}), UNREADABLE
    ),
    # ignored
    "plugin": Attack(lambda state, code: None, None),  # the folder comes from plugin_that_runs
    "optimizer": Attack(part("optimizer", _name="adam", adam_betas=CODE), None),
    "paths of weights": Attack(part("model", encoder_embed_path="/dev/null/none"), None),
}


def marker_code(marker: Path) -> str:
    """Python that makes the file ``marker``."""
    return f"__import__('pathlib').Path({os.fspath(marker)!r}).touch()"


def plugin_that_runs(folder: Path, marker: Path) -> Path:
    """A package whose import makes the file ``marker``."""
    package = folder / "hostile_plugin"
    package.mkdir()
    (package / "__init__.py").write_text(marker_code(marker), encoding="utf-8")
    return package


def write_hostile(name: str, good: Path, target: Path, marker: Path) -> None:
    """Write the checkpoint ``good`` with the change ``name`` to ``target``."""
    state = torch.load(good, weights_only=True)
    # what fairseq's trainer leaves out of an untrained model
    if not isinstance(state["cfg"]["optimizer"], (dict, Namespace)):
        state["cfg"]["optimizer"] = {}
    ATTACKS[name].change(state, marker_code(marker))
    if name == "plugin":
        state["cfg"]["common"]["user_dir"] = str(plugin_that_runs(target.parent.parent, marker))
    torch.save(state, target, pickle_module=pickle)
