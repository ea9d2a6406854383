"""Import a stock masked LM of Hugging Face as a checkpoint of the equivalent encoder; training can start from it."""

import logging
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_directory
from mlsm_plugin.core.files.hf_files import LATENT_HEAD, WEIGHTS, first_line, hf_folder, import_transformers
from mlsm_plugin.core.hidden_states.hf_encoder import check_vocabulary, load_library_model, supported_config
from mlsm_plugin.core.text.masked_reading import reading_as_trained
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import configuration_of, write_untrained
from mlsm_plugin.fairseq_plugin.text.text_tokenizer import HuggingFaceTextTokenizer
from mlsm_plugin.hub import deberta_import, from_pretrained, modernbert_import, roberta_import
from mlsm_plugin.hub.comparison import Comparison, compare

logger = logging.getLogger(__name__)

CHECKPOINT = "model.pt"
MASKED_LM = ("--task", "plain_masked_lm", "--criterion", "masked_lm")
# as Min et al. (2022) query their models: with RoBERTa's mask, and with flatter probabilities of closed sets
NPM = (
    "--task",
    "nonparametric_masked_lm",
    "--span-mask-symbols",
    "shared",
    "--criterion",
    "span_contrastive",
    "--closed-set-temperature",
    "5.0",
)
# by the model type in transformers
IMPORT_MODULES = {
    "deberta-v2": deberta_import,
    "modernbert": modernbert_import,
    **dict.fromkeys(roberta_import.TYPES, roberta_import),
}
EMBEDDINGS = "embeddings.word_embeddings.weight"


@dataclass(frozen=True)
class ImportProof(Comparison):
    """The result of a comparison with the written files, loaded again."""

    flags: tuple[str, ...]  # flags of ``fairseq-train`` for the same model and objective


def import_model(name: PathLike, output: PathLike, lines: Sequence[str], *, npm: str | None = None) -> ImportProof:
    """Write a checkpoint, ``dict.txt`` and the tokenizer, load them, and compare with Hugging Face's model.

    The task of the checkpoint is ``plain_masked_lm``, or ``nonparametric_masked_lm`` with ``npm`` (``phrase`` or
    ``single``: what is retrieved); a missing head of the latter is initialized at random. ``mlsm binarize`` makes the
    same dictionary with this tokenizer.

    ValueError if none of our encoders can compute the model, its weights or its tokenizer cannot be read, ids differ, a
    logit differs by more than 1e-4, or the folder is not new. Nothing appears in it unless the comparison on ``lines``
    of text succeeds.
    """
    output = Path(output)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"{output} exists already; an import needs a new folder")
    transformers = import_transformers()
    folder = hf_folder(name, weights=True)
    config = supported_config(folder, sorted(IMPORT_MODULES))
    kind = IMPORT_MODULES[config.model_type]
    kind.check_importable(config, folder)
    if (folder / LATENT_HEAD).is_file():
        logger.warning(f"{folder}: {LATENT_HEAD} is not imported; training with codes makes a new latent head")
    tokenizer = HuggingFaceTextTokenizer(folder)
    check_vocabulary(tokenizer.tokenizer, int(config.vocab_size), folder)
    state = lightning_weights(folder)
    new_head = None if npm is None else "and not trained"
    model = load_library_model(folder, config, "AutoModelForMaskedLM", state=state, new_head=new_head).float().eval()
    ids = torch.from_numpy(tokenizer.tokenizer.hf_ids)
    flags = [*(MASKED_LM if npm is None else (*NPM, "--span-mode", npm)), "--arch", kind.ARCHITECTURE]
    flags += kind.architecture_flags(config)
    with atomic_directory(output) as temporary:
        tokenizer.write_to(temporary)
        weights = kind.imported_weights(model.state_dict(), ids, config)
        write_untrained(temporary / CHECKPOINT, configuration_of([str(output.resolve()), *flags]), weights)
        interface = from_pretrained(temporary)
        # unchanged, since HuggingFaceTextTokenizer's backend reads special tokens as text
        theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        # other tokenizers read text beside masks differently than in training
        masked = reading_as_trained(theirs) is theirs
        comparison = compare(interface, ids, theirs, model, lines, word="imported", masked=masked)
    return ImportProof(**vars(comparison), flags=tuple(flags))


def lightning_weights(folder: Path) -> dict[str, Tensor] | None:
    """The weights, by transformers' names, in the only Lightning checkpoint (``*.ckpt``) of a folder without other
    weights; None if there is none. ValueError if it holds anything but plain data.
    """
    files = list(folder.glob("*.ckpt"))
    if len(files) != 1 or any((folder / name).is_file() for name in WEIGHTS):
        return None
    try:
        state = torch.load(files[0], map_location="cpu", weights_only=True)["state_dict"]
        whole = next(name for name in state if name.endswith(EMBEDDINGS))
    except Exception as error:  # reading another kind of file raises errors of no common type
        # torch's own message advises to load without its protection
        objects = isinstance(error, pickle.UnpicklingError)
        why = "it holds Python objects, which are not loaded" if objects else first_line(error)
        raise ValueError(f"{files[0]} is not a readable checkpoint of Lightning ({why})") from None
    front = whole.removesuffix(EMBEDDINGS).removesuffix("roberta.").removesuffix("bert.")
    return {name.removeprefix(front): values for name, values in state.items() if name.startswith(front)}
