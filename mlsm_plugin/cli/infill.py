"""``mlsm infill``: fill the gaps of texts with a denoising model."""

import argparse
import sys

from mlsm_plugin.cli.coding_options import add_checkpoint, add_device, check_positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "texts with gaps, each in quotes, such as 'The <extra_id_0> walks in <extra_id_1> park'"
    parser.add_argument("texts", nargs="+", metavar="TEXT", help=text)
    add_checkpoint(parser)
    parser.add_argument(
        "--beam", type=int, default=4, metavar="N", help="number of hypotheses that the beam search keeps"
    )
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="longest target in tokens (default: the model's positions)"
    )
    add_device(parser)


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Print each text with its gaps filled, and the fillers with their scores."""
    from mlsm_plugin.core.hidden_states.devices import default_device
    from mlsm_plugin.hub import from_pretrained
    from mlsm_plugin.hub.infilling import DenoisingHubInterface

    check_positive(args, "beam", "max_length")
    model = from_pretrained(args.checkpoint)
    if not isinstance(model, DenoisingHubInterface):
        raise ValueError(f"{args.checkpoint} is not a denoising model; train one with --task span_denoising")
    model.to(default_device(args.device))
    for text in args.texts:
        filled = model.infill(text, beam=args.beam, max_length=args.max_length)
        print(filled.text)
        for filler in filled.fillers:
            print(f"  {filler.sentinel}  {filler.score:7.3f}  {filler.text}")
            if filler.is_missing:
                print(f"mlsm: warning: the model wrote nothing for {filler.sentinel}", file=sys.stderr)
    return 0
