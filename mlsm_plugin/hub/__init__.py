"""Load a trained model from a folder, and use it."""

from typing import Any

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.model_files import bpe_options, checkpoint_of
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import read_contents
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import load_model
from mlsm_plugin.fairseq_plugin.data.token_blocks import load_dictionary
from mlsm_plugin.fairseq_plugin.tasks.span_denoising import SpanDenoisingTask
from mlsm_plugin.hub.infilling import DenoisingHubInterface
from mlsm_plugin.hub.interface import MlsmHubInterface, TokenProperties


def from_pretrained(
    model_name_or_path: PathLike,
    checkpoint_file: str | None = None,
    data_name_or_path: PathLike = ".",
    *,
    bpe: str | None = None,
    **overrides: object,
) -> Any:  # with a union, every caller would have to check the type
    """Load a model from the folder of its training run; nothing else is needed.

    Args:
        model_name_or_path: folder with the checkpoint, ``dict.txt`` and the tokenizer (training puts them there),
            or a checkpoint file in such a folder.
        checkpoint_file: name of the checkpoint; None: the first that exists of ``model.pt``, ``checkpoint_best.pt``,
            ``checkpoint_last.pt``, the highest-numbered checkpoint, and the only checkpoint.
        data_name_or_path: where ``dict.txt`` is, absolute or relative to the folder.
        bpe: fairseq's name of a tokenizer that replaces the folder's tokenizer; its options go into ``overrides``.
        overrides: further model or task options.

    Returns:
        a :class:`MlsmHubInterface`, or for a model of ``span_denoising`` a
        :class:`mlsm_plugin.hub.infilling.DenoisingHubInterface`; in eval mode, on the CPU.

    Raises:
        FileNotFoundError: the folder, a checkpoint, the dictionary or the tokenizer is missing.
        ValueError: the file is not a checkpoint.
    """
    checkpoint = checkpoint_of(model_name_or_path, checkpoint_file)
    data = checkpoint.parent / data_name_or_path
    if not (data / "input0" / "dict.txt").is_file():  # where a fine-tuned classifier's dataset has it
        read_contents(checkpoint)  # another kind of file has no dictionary beside it either
        load_dictionary(data)  # raises an error that says what to do
    tokenizer = {"bpe": bpe or "sentencepiece"}
    if tokenizer["bpe"] == "sentencepiece" and "sentencepiece_model" not in overrides:
        tokenizer = bpe_options(checkpoint.parent, data)
    overrides = {"data": str(data), "load_checkpoint_heads": True, **tokenizer, **overrides}
    model, cfg, task = load_model(checkpoint, overrides)
    interface = DenoisingHubInterface if isinstance(task, SpanDenoisingTask) else MlsmHubInterface
    hub = interface(cfg, task, model).eval()
    hub.checkpoint = checkpoint
    return hub


__all__ = ["DenoisingHubInterface", "MlsmHubInterface", "TokenProperties", "checkpoint_of", "from_pretrained"]
