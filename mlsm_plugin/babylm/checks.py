"""Check that a run can be submitted: names, counts, limits, cards, and that transformers reads each folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mlsm_plugin.babylm.cards import CARD
from mlsm_plugin.babylm.ledger import LEDGER, OF_RUN, Ledger
from mlsm_plugin.babylm.settings import CHECKPOINTS, MAIN, TEXT_FOLDER, TRACKS
from mlsm_plugin.core.files.atomic_files import read_json, sha256_of_files
from mlsm_plugin.core.files.hf_files import first_line, import_transformers, weight_files
from mlsm_plugin.core.files.json_checks import check_json, fields, list_of, number, text, whole
from mlsm_plugin.core.text.words import count_words

# the JSON beside each folder: a text, its ids, how many of them the model gets, the masked position, and logits of the
# trained model; also a text with a mask, which older files lack
TRAINED_LOGITS = fields(
    {"text": text, "ids": list_of(whole()), "length": whole(1), "masked": whole(), "logits": list_of(number)},
    {"with_mask": fields({"text": text, "ids": list_of(whole())})},
)
FEWEST_CHARACTERS = 200  # of a card
LARGEST_DIFFERENCE = 1e-4  # of two logits


def problems_of(run: Path) -> list[str]:
    """The problems of a run, a line each, with the installed transformers; errors are those of :meth:`Ledger.read`."""
    ledger = Ledger.read(run)
    of_run = [*_of_the_ledger(ledger), *_of_the_texts(run, ledger)]
    return [*of_run, *(line for name in _names(ledger) for line in _of_a_folder(run, name, ledger))]


def _names(ledger: Ledger) -> list[str]:
    return [*ledger.names, MAIN]


def _of_the_ledger(ledger: Ledger) -> Iterator[str]:
    if ledger.words > ledger.words_allowed:
        yield f"all text has {ledger.words:,} words, but the track allows {ledger.words_allowed:,}"
    if ledger.exposures > ledger.exposures_allowed:
        yield f"{ledger.exposures:,} words were seen, but the track allows {ledger.exposures_allowed:,}"
    if ledger.seen != ledger.planned:
        yield f"the run has seen {ledger.seen:,} of {ledger.planned:,} words; run `mlsm babylm train` again"
    limits = TRACKS.get(ledger.track)  # None: only the ledger knows the limits of a custom track
    if limits is not None and (ledger.words_allowed, ledger.exposures_allowed) != (limits.words, limits.exposures):
        yield (
            f"{LEDGER} allows {ledger.words_allowed:,} words and {ledger.exposures_allowed:,} seen ones, and the track "
            f"{ledger.track} {limits.words:,} and {limits.exposures:,}"
        )
    needed = {} if limits is None else limits.checkpoints(ledger.planned)
    if lacking := [name for name in needed if name not in ledger.names]:
        yield f"{LEDGER} does not name the checkpoints that the track asks for: {', '.join(lacking)}"
    counts = [ledger.checkpoints[name]["words"] for name in _names(ledger) if name in ledger.checkpoints]
    if counts != sorted(counts):
        yield f"the checkpoints have seen {counts} words, which are not in ascending order"


def _of_the_texts(run: Path, ledger: Ledger) -> Iterator[str]:
    """Count the words of the run's training texts again; texts may have been deleted."""
    for entry in ledger.texts:
        path = run / TEXT_FOLDER / entry["file"]
        if entry["of"] == OF_RUN and path.is_file() and (words := count_words(path)) != entry["words"]:
            yield f"{path} has {words:,} words, and {LEDGER} says {entry['words']:,}"


def _of_a_folder(run: Path, name: str, ledger: Ledger) -> Iterator[str]:
    folder = run / CHECKPOINTS / name
    entry = ledger.checkpoints.get(name)
    again = "run `mlsm babylm train` again"
    lost = again if name == MAIN else "restore it from a copy, or train in another --output"
    if entry is None or not folder.is_dir():
        is_over = ledger.seen == ledger.planned and name != MAIN
        yield f"{name} is missing; {again if entry is None and not is_over else lost}"
        return
    if entry["words"] < ledger.names.get(name, ledger.planned):
        yield f"{name} has seen only {entry['words']:,} words"
    card = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else ""
    if len(card) < FEWEST_CHARACTERS:
        yield f"{name} has no model card of {FEWEST_CHARACTERS} characters ({CARD}); {again}"
    elif "\nlicense: " not in card.partition("\n---\n")[0]:
        yield f"{name} has no licence; {again} with --license, such as --license mit"
    try:
        if sha256_of_files(*weight_files(folder)) != entry["sha256"]:
            yield f"{name} has other weights than those that were exported; delete {folder}, and {lost}"
        else:
            path = folder.with_suffix(".json")
            yield from _of_the_model(folder, name, check_json(read_json(path), TRAINED_LOGITS, path))
    except Exception as error:  # errors of several libraries
        yield f"{name} cannot be opened: {first_line(error)}"


@torch.no_grad()
def _of_the_model(folder: Path, name: str, trained: dict[str, Any]) -> Iterator[str]:
    """Open a folder like the evaluation pipeline, and compare ids and logits with those of the trained model."""
    transformers = import_transformers()
    tokenizer = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    if not tokenizer.is_fast or tokenizer.mask_token is None:
        yield f"the tokenizer of {name} is not fast, or has no mask"
        return
    read = tokenizer(trained["text"], return_offsets_mapping=True)
    if read["input_ids"] != trained["ids"] or len(read["offset_mapping"]) != len(trained["ids"]):
        yield f"the tokenizer of {name} gives other ids or offsets than the one used in training"
        return
    with_mask = trained.get("with_mask")
    if with_mask is not None and tokenizer(with_mask["text"])["input_ids"] != with_mask["ids"]:
        yield f"the tokenizer of {name} gives other ids beside a mask than the one used in training; export it again"
        return
    ids = torch.tensor(trained["ids"][: trained["length"]])
    ids[trained["masked"]] = tokenizer.mask_token_id
    logits = model(ids[None]).logits[0, trained["masked"]]
    expected = torch.tensor(trained["logits"])
    largest = float((logits[spread(len(logits), len(expected))] - expected).abs().max())
    if not largest <= LARGEST_DIFFERENCE:  # true for NaN, too
        yield f"the logits of {name} differ by {largest:.2g} from those of the trained model"


def spread(size: int, count: int) -> torch.Tensor:
    """``count`` indices evenly spread over ``size`` logits, int64."""
    return torch.linspace(0, size - 1, count, dtype=torch.float64).long()
