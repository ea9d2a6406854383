"""A stock masked LM of Hugging Face as a checkpoint of the encoder that computes the same; training starts from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_directory
from mlsm_plugin.core.files.hf_files import hf_folder, import_transformers
from mlsm_plugin.core.hidden_states.hf_encoder import check_vocabulary, load_model, supported_config
from mlsm_plugin.fairseq_door.seams.checkpoint_states import configuration_of, write_untrained
from mlsm_plugin.fairseq_door.text.text_tokenizer import HuggingFaceTextTokenizer
from mlsm_plugin.hub import deberta_import, from_pretrained, modernbert_import
from mlsm_plugin.hub.comparison import Comparison, compare

CHECKPOINT = "model.pt"
OBJECTIVE = ("--task", "plain_masked_lm", "--criterion", "masked_lm")


KINDS = {"deberta-v2": deberta_import, "modernbert": modernbert_import}  # by the type of the library's model


@dataclass(frozen=True)
class ImportProof(Comparison):
    """What was found when the written files were loaded."""

    flags: tuple[str, ...]  # of ``fairseq-train``, which make the same model


def import_model(name: PathLike, output: PathLike, lines: Sequence[str]) -> ImportProof:
    """Write a checkpoint, ``dict.txt`` and the tokenizer, load them, and compare with Hugging Face's model.

    The checkpoint is that of an untrained ``plain_masked_lm``; the dictionary is the one that ``mlsm binarize`` makes
    with this tokenizer. ValueError if the model is none that an encoder of ours can compute, its weights or its
    tokenizer cannot be read, ids differ, a logit differs by more than 1e-4, or the folder is not new. Nothing appears
    in it unless the comparison on ``lines`` of text succeeds.
    """
    output = Path(output)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"{output} exists already; an import needs a new folder")
    transformers = import_transformers()
    folder = hf_folder(name, weights=True)
    config = supported_config(folder, sorted(KINDS))
    kind = KINDS[config.model_type]
    kind.check_importable(config, folder)
    tokenizer = HuggingFaceTextTokenizer(folder)
    check_vocabulary(tokenizer.tokenizer, int(config.vocab_size), folder)
    model = load_model(folder, config, kind.LIBRARY_CLASS).float().eval()
    ids = torch.from_numpy(tokenizer.tokenizer.hf_ids)
    flags = ["--arch", kind.ARCHITECTURE, *kind.architecture_flags(config)]
    with atomic_directory(output) as temporary:
        tokenizer.write_to(temporary)
        weights = kind.imported_weights(model.state_dict(), ids, config)
        write_untrained(temporary / CHECKPOINT, configuration_of([str(output.resolve()), *OBJECTIVE, *flags]), weights)
        interface = from_pretrained(temporary)
        # as it is: that of HuggingFaceTextTokenizer takes special tokens as text
        theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        found = compare(interface, ids, theirs, model, lines, word="imported")
    return ImportProof(**vars(found), flags=tuple(flags))
