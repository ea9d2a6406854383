"""``mlsm infill``: fill the gaps of texts with a denoising model."""

import argparse
import sys
from typing import TYPE_CHECKING

from mlsm_plugin.cli.coding_options import add_checkpoint, add_device, check_positive
from mlsm_plugin.core.files.hf_files import is_hf

if TYPE_CHECKING:
    from mlsm_plugin.hub import DenoisingHubInterface
    from mlsm_plugin.huggingface.t5_infilling import T5Infiller


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "texts with gaps, each in quotes, such as 'The <extra_id_0> walks in <extra_id_1> park'"
    parser.add_argument("texts", nargs="+", metavar="TEXT", help=text)
    add_checkpoint(parser, help="checkpoint of the model, its folder, or hf: and the folder or hub name of a T5")
    parser.add_argument(
        "--beam", type=int, default=4, metavar="N", help="number of hypotheses that the beam search keeps"
    )
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="longest target in tokens (default: the model's positions; T5: 512)"
    )
    add_device(parser)


def needs_fairseq(args: argparse.Namespace) -> bool:
    """False for a Hugging Face T5, else True."""
    return not is_hf(args.checkpoint)


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Print each text with its gaps filled, and the fillers with their scores."""
    from mlsm_plugin.core.machine.devices import default_device

    check_positive(args, "beam", "max_length")
    model = _open(args.checkpoint)
    model.to(default_device(args.device))
    for text in args.texts:
        filled = model.infill(text, beam=args.beam, max_length=args.max_length)
        print(filled.text)
        for filler in filled.fillers:
            print(f"  {filler.sentinel}  {filler.score:7.3f}  {filler.text}")
            if filler.is_missing:
                print(f"mlsm: warning: the model wrote nothing for {filler.sentinel}", file=sys.stderr)
    return 0


def _open(checkpoint: str) -> "T5Infiller | DenoisingHubInterface":
    """Open a fairseq checkpoint or a Hugging Face T5; ValueError if it is not a denoising model."""
    if is_hf(checkpoint):
        from mlsm_plugin.huggingface.t5_infilling import T5Infiller

        return T5Infiller(checkpoint)
    from mlsm_plugin.hub import DenoisingHubInterface, from_pretrained

    model = from_pretrained(checkpoint)
    if not isinstance(model, DenoisingHubInterface):
        raise ValueError(f"{checkpoint} is not a denoising model; train one with --task span_denoising")
    return model
