"""A stock ``ModernBertForMaskedLM`` of Hugging Face as a checkpoint of ``mlsm_modern``, which training starts from."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_directory
from mlsm_plugin.core.files.hf_files import GLOBAL, LOCAL, global_every, hf_folder, import_transformers
from mlsm_plugin.core.hidden_states.hf_encoder import check_vocabulary, load_model, supported_config
from mlsm_plugin.fairseq_door.models.mlsm_modern import MlsmModernModel
from mlsm_plugin.fairseq_door.seams.checkpoint_states import configuration_of, write_untrained
from mlsm_plugin.fairseq_door.seams.model_parts import flags_of
from mlsm_plugin.fairseq_door.tasks.portable_masked_lm import PortableMaskedLMConfig
from mlsm_plugin.fairseq_door.text.text_tokenizer import HuggingFaceTextTokenizer
from mlsm_plugin.hub import from_pretrained
from mlsm_plugin.hub.comparison import Comparison, compare
from mlsm_plugin.hub.stock_models import library_classes, modernbert_names, renamed

CHECKPOINT = "model.pt"
OF_MLSM_MODERN = {
    **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), False),
    **dict.fromkeys(("hidden_activation", "classifier_activation"), "gelu"),
    "tie_word_embeddings": True,
    "norm_eps": 1e-5,
}
OBJECTIVE = ("--task", "plain_masked_lm", "--criterion", "masked_lm", "--arch", "mlsm_modern")


@dataclass(frozen=True)
class ImportProof(Comparison):
    """What was found when the written files were loaded."""

    flags: tuple[str, ...]  # of ``fairseq-train``, which make the same model


def import_modernbert(name: PathLike, output: PathLike, lines: Sequence[str]) -> ImportProof:
    """Write a checkpoint, ``dict.txt`` and the tokenizer, load them, and compare with Hugging Face's model.

    The checkpoint is that of an untrained ``plain_masked_lm``; the dictionary is the one that ``mlsm binarize`` makes
    with this tokenizer. ValueError if the model is no ModernBERT that ``mlsm_modern`` can compute, its weights or its
    tokenizer cannot be read, ids differ, a logit differs by more than 1e-4, or the folder is not new. Nothing appears
    in it unless the comparison on ``lines`` of text succeeds.
    """
    output = Path(output)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"{output} exists already; an import needs a new folder")
    transformers = import_transformers()
    folder = hf_folder(name, weights=True)
    config = supported_config(folder, ["modernbert"])
    library_classes()  # raises an error where transformers is too old
    check_importable(config, folder)
    tokenizer = HuggingFaceTextTokenizer(folder)
    check_vocabulary(tokenizer.tokenizer, int(config.vocab_size), folder)
    model = load_model(folder, config, "ModernBertForMaskedLM").float().eval()
    ids = torch.from_numpy(tokenizer.tokenizer.hf_ids)
    flags = architecture_flags(config)
    with atomic_directory(output) as temporary:
        tokenizer.write_to(temporary)
        weights = imported_weights(model.state_dict(), ids, config.num_hidden_layers)
        write_untrained(temporary / CHECKPOINT, configuration_of([str(output.resolve()), *OBJECTIVE, *flags]), weights)
        interface = from_pretrained(temporary)
        # as it is: that of HuggingFaceTextTokenizer takes special tokens as text
        theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        found = compare(interface, ids, theirs, model, lines, word="imported")
    return ImportProof(**vars(found), flags=tuple(flags))


def check_importable(config: Any, folder: Path) -> None:
    """Raise ValueError unless ``mlsm_modern`` computes what a model with this configuration computes."""
    for name, value in OF_MLSM_MODERN.items():
        if getattr(config, name) != value:
            raise ValueError(f"{folder} has {name} {getattr(config, name)}; only {value} can be imported")
    for kind in set(config.layer_types):
        rope = config.rope_parameters[kind]["rope_type"]
        if rope != "default":
            raise ValueError(f"{folder} has rotary positions of type {rope}; only the default type can be imported")
    if LOCAL in config.layer_types and config.local_attention < 2:
        raise ValueError(f"{folder} has local_attention {config.local_attention}; it must be at least 2 to be imported")
    if global_every(config.layer_types) is None:
        raise ValueError(
            f"{folder} has other layer_types than every N-th layer global, beginning with the first; it cannot be "
            "imported"
        )


def architecture_flags(config: Any) -> list[str]:
    """Flags of ``fairseq-train`` that make the model of a ``ModernBertConfig``.

    Samples are as long as the default, or as the model can take if that is less.
    """
    positions, rope = int(config.max_position_embeddings), config.rope_parameters
    values: dict[str, Any] = {
        "encoder_layers": int(config.num_hidden_layers),
        "encoder_embed_dim": int(config.hidden_size),
        "encoder_ffn_embed_dim": int(config.intermediate_size),
        "encoder_attention_heads": int(config.num_attention_heads),
        "max_positions": positions,
        "attention_window": 0,
        "rope_theta": float(rope[GLOBAL]["rope_theta"]),
        "dropout": float(config.embedding_dropout),
        "attention_dropout": float(config.attention_dropout),
        "activation_dropout": float(config.mlp_dropout),
    }
    if LOCAL in config.layer_types:
        values |= {
            "attention_window": 2 * (int(config.local_attention) // 2),
            "global_attention_every": global_every(config.layer_types),
            "local_rope_theta": float(rope[LOCAL]["rope_theta"]),
        }
    flags = flags_of(MlsmModernModel.add_args, Namespace(**values), without=())
    return [*flags, "--tokens-per-sample", str(min(positions, int(PortableMaskedLMConfig.tokens_per_sample)))]


def imported_weights(state: dict[str, Tensor], ids: Tensor, layers: int) -> dict[str, Tensor]:
    """Weights of ``mlsm_modern`` from the state dict of a ``ModernBertForMaskedLM``, float32.

    ``ids`` has for each id of the dictionary Hugging Face's. Without a bias of the output, the bias is 0.
    """
    state = {"decoder.bias": torch.zeros(len(state["decoder.weight"]))} | state
    names = {ours: theirs for theirs, ours in modernbert_names(layers).items()}
    return {name: values.clone() for name, values in renamed(state, names, ids).items()}
