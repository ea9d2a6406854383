"""Which class opens a model of which name, and the blocks that fit it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsm_plugin.core.hidden_states import sources
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceEncoder, HuggingFaceSource
from mlsm_plugin.core.hidden_states.sources import default_tokens_per_sample, open_encoder, register_source, source_of
from mlsm_plugin.fairseq_plugin.coding.fairseq_encoder import FairseqEncoder
from tests.tiny_models import MASKED_LM, TRAINED_TOKENS, TinyData, positions, save_untrained


@pytest.fixture
def own_sources(monkeypatch: pytest.MonkeyPatch) -> dict[str, sources.Source]:
    """A copy of the registry, which the test may fill."""
    copy = dict(sources._SOURCES)
    monkeypatch.setattr(sources, "_SOURCES", copy)
    return copy


class OtherEncoder(FairseqEncoder):
    """A source of a plugin."""


def test_prefix_of_a_name_decides(tmp_path: Path, own_sources: dict[str, sources.Source]) -> None:
    assert source_of("model.pt") is source_of(tmp_path / "absent.pt") is FairseqEncoder
    assert source_of("hf:some/model") is HuggingFaceSource
    assert register_source("mine:")(OtherEncoder) is OtherEncoder
    assert register_source("mine:")(OtherEncoder) is OtherEncoder  # a module that is imported again
    assert source_of("mine:model") is OtherEncoder
    assert source_of("c:/model.pt") is FairseqEncoder  # a letter alone is a drive
    with pytest.raises(ValueError, match="the prefix mine: belongs to OtherEncoder; choose another one"):
        register_source("mine:")(FairseqEncoder)
    with pytest.raises(ValueError, match="the prefix hf: belongs to HuggingFaceSource"):
        register_source("hf:")(OtherEncoder)
    with pytest.raises(ValueError, match="HuggingFaceEncoder is not a subclass of HiddenStateSource"):
        register_source("theirs:")(HuggingFaceEncoder)  # type: ignore[type-var]
    assert source_of("hf:some/model") is HuggingFaceSource


@pytest.mark.parametrize(
    "prefix", ["", ":", "m:", "mine", "Mine:", "mi ne:", "1mine:", "mine:x", "mine::", "-mine:", "mine:\n"]
)
def test_prefixes_of_another_form_are_refused(prefix: str, own_sources: dict[str, sources.Source]) -> None:
    before = dict(own_sources)
    with pytest.raises(ValueError, match="is two or more lower-case letters and a colon, such as") as error:
        register_source(prefix)
    assert repr(prefix) in str(error.value)
    assert own_sources == before


def test_unknown_prefix_names_those_that_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"other:model: the prefix other: is not known \(known: hf:\); .*--user-d"):
        source_of("other:model")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other:model").touch()
    assert source_of("other:model") is FairseqEncoder  # there is such a file


def test_blocks_are_as_long_as_the_model_can_take_and_was_trained_on(tiny: TinyData, tmp_path: Path) -> None:
    assert default_tokens_per_sample(tiny.model) == TRAINED_TOKENS
    for number, trained, expected in ((128, 128, 128), (128, 512, 128), (1024, 1024, 512), (1024, 48, 48)):
        flags = positions(number, trained)
        model = save_untrained(tiny.data_bin, tmp_path / f"{number}-{trained}", *flags, **MASKED_LM)
        assert default_tokens_per_sample(model) == expected


def test_encoder_is_opened_by_its_source(tiny: TinyData, own_sources: dict[str, sources.Source]) -> None:
    own_sources[""] = OtherEncoder
    encoder = open_encoder(tiny.model, tiny.data_bin, layer=1, device="cpu")
    assert type(encoder) is OtherEncoder
    assert (encoder.layer, encoder.num_layers, encoder.dim) == (1, 2, 32)
    with pytest.raises(ValueError, match="--layer 3 is out of range"):
        open_encoder(tiny.model, tiny.data_bin, layer=3)
