"""``mlsm inspect``: write an HTML report of what the latent properties mean."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsm_plugin.cli.coding_options import check_positive
from mlsm_plugin.cli.next_commands import encode_command
from mlsm_plugin.files.atomic_files import check_output_file
from mlsm_plugin.files.model_files import checkpoint_of

if TYPE_CHECKING:
    import numpy as np
    from scipy.sparse import csr_matrix

    from mlsm_plugin.hidden_states.block_reader import BlockReader
    from mlsm_plugin.reports.latent_report import AtomSummary
    from mlsm_plugin.sparse_coding.code_store import CodeStore

# what a page shows of the figures of `mlsm evaluate dictionary`
RECONSTRUCTION_FACTS = {
    "explained_variance": "explained variance",
    "cossim": "mean cosine of hidden states and reconstructions",
    "l2_ratio": "mean ratio of their norms",
    "l0": "atoms per token",
    "frac_alive": "share of the atoms in use",
    "freq_over_10_percent": "share of the atoms that every tenth token uses",
}
LOSS_FACTS = {
    "ce_loss_without_sae": "masked-LM loss, nats",
    "ce_loss_with_sae": "the same with reconstructions",
    "ce_loss_with_ablation": "the same with zeros",
    "ce_loss_score": "share of the loss that is recovered",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "folder",
        metavar="RUN_OR_DATA_BIN",
        help="binarized dataset with codes, --output of `mlsm preprocess`, or --save-dir of a training run",
    )
    parser.add_argument(
        "--output", default="report.html", metavar="HTML", help="page to write; it opens without a network"
    )
    parser.add_argument("--split", default="train", help="split whose codes are shown")
    parser.add_argument(
        "--codes", metavar="DIR", help="folder of the codes (default: that of the run, or the binarized dataset)"
    )
    parser.add_argument("--max-tokens", type=int, default=2_000_000, metavar="N", help="number of tokens to read")
    parser.add_argument(
        "--quality", metavar="JSON", help="also show the figures that `mlsm evaluate dictionary --output` wrote"
    )


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Summarize every atom and write the page."""
    from mlsm_plugin.reports.latent_report import render_report

    check_positive(args, "max_tokens")
    check_output_file(args.output)
    quality = _quality(args.quality) if args.quality else None
    data_bin, codes = find_codes(Path(args.folder), Path(args.codes) if args.codes else None)
    summaries, store = summarize_split(data_bin, args.split, codes, max_tokens=args.max_tokens)
    facts = _facts(store, summaries, data_bin, args.split)
    if args.max_tokens < store.num_tokens:
        facts["tokens"] = f"the first {args.max_tokens:,} of {store.num_tokens:,}"
    if quality is not None:
        facts |= _quality_facts(quality, store, args.quality)
    render_report(summaries, title="Latent semantic properties", facts=facts, output_path=args.output)
    print(f"{len(summaries)} atoms, {facts['dead atoms here']} of them dead here: {args.output}")
    return 0


def find_codes(folder: Path, chosen: Path | None = None) -> tuple[Path, Path]:
    """The binarized dataset that ``folder`` is, holds, or was trained on, and the folder of its codes.

    Args:
        folder: a dataset, its parent, or the folder of a run.
        chosen: folder of the codes; None: the dataset, that of the run, or the last stage of `mlsm pretrain`.

    Raises:
        FileNotFoundError: there is no such dataset, or it is that of a run in stages without codes.
    """
    for candidate in (folder, folder / "data-bin"):
        if (candidate / "train.idx").exists() or (candidate / "valid.idx").exists():
            return candidate, chosen or candidate
    if not any(folder.glob("*.pt")):
        raise FileNotFoundError(f"{folder} is neither a binarized dataset nor a run (no train.idx, no checkpoint)")
    data, codes = _training_data(checkpoint_of(folder))
    if not (data / "dict.txt").exists():
        raise FileNotFoundError(f"{folder} was trained on {data}, which does not exist; pass the binarized dataset")
    if chosen is None and (folder / "stages.json").is_file():
        codes = _codes_of_last_stage(folder, data)
    print(f"{folder} was trained on {data}, which is read")
    return data, chosen or codes


def _training_data(checkpoint: Path) -> tuple[Path, Path]:
    """The first dataset that a run was trained on, and the folder of its codes."""
    from fairseq import utils

    from mlsm_plugin.fairseq_seams.checkpoint_states import config_in, read_state

    task = config_in(read_state(checkpoint)).task
    codes = getattr(task, "latent_codes", None) or task.data
    return Path(utils.split_paths(task.data)[0]), Path(utils.split_paths(codes)[0])


def _codes_of_last_stage(folder: Path, data: Path) -> Path:
    """The folder of the last stage that has codes; the best checkpoint may be of an earlier one.

    Raises:
        FileNotFoundError: no stage has codes.
    """
    from mlsm_plugin.sparse_coding.code_store import META_FILE

    stages = sorted(folder.glob("stage-*"), key=lambda path: (len(path.name), path.name), reverse=True)
    for stage in stages:
        if any(stage.glob(f"*.codes/{META_FILE}")):
            return stage
    for stage in stages:
        if (stage / "dictionary" / META_FILE).is_file():
            command = encode_command(data, str(stage / "model.pt"), stage / "dictionary")
            raise FileNotFoundError(
                f"{folder} has no stored codes (--latent-source online stores none); make some with "
                f"`{command} --output DIR`, and pass --codes DIR"
            )
    raise FileNotFoundError(f"{folder} has no codes yet; the second stage begins with them")


def summarize_split(
    data_bin: Path, split: str, folder: Path, *, max_tokens: int
) -> tuple[list[AtomSummary], CodeStore]:
    """Summaries of all atoms over the first ``max_tokens`` tokens of a split, and its codes, those in ``folder``."""
    from mlsm_plugin.data.token_blocks import open_codes
    from mlsm_plugin.files.json_checks import check_json
    from mlsm_plugin.hidden_states.block_reader import BlockReader, BlockSettings
    from mlsm_plugin.reports.latent_report import summarize_atoms
    from mlsm_plugin.sparse_coding.code_store import INSPECTED_CHECK, META_FILE

    codes = folder / f"{split}.codes"
    store = open_codes(data_bin / split, codes)
    blocks = check_json(store.meta, INSPECTED_CHECK, codes / META_FILE)["blocks"]
    settings = BlockSettings(blocks["tokens_per_sample"], blocks["sample_break_mode"])
    reader = BlockReader(data_bin, split, settings)
    symbols = reader.dictionary.symbols
    summaries = summarize_atoms(
        _coded_blocks(reader, store, max_tokens), num_atoms=store.num_atoms, num_types=len(symbols), symbols=symbols
    )
    return summaries, store


def _coded_blocks(reader: BlockReader, store: CodeStore, max_tokens: int) -> Iterator[tuple[np.ndarray, csr_matrix]]:
    from mlsm_plugin.files.progress import Progress

    done = 0  # a bar does not count where TQDM_DISABLE is set
    with Progress(
        total=min(max_tokens, reader.num_tokens), desc="reading codes", unit="token", unit_scale=True
    ) as progress:
        for start, size in zip(reader.starts, reader.sizes, strict=True):
            if done >= max_tokens:
                break
            yield reader.flat_tokens(int(start), int(start + size)), store.rows(int(start), int(start + size))
            done += int(size)
            progress.update(int(size))


def _facts(store: CodeStore, summaries: list[AtomSummary], data_bin: Path, split: str) -> dict[str, str]:
    meta = store.meta
    health = meta.get("dictionary_health") or {}
    per_coded_token = meta["mean_nonzeros"] * meta["token_count"] / max(meta["coded_tokens"], 1)
    facts = {
        "data": f"{data_bin.name}, {split}",
        "tokens": f"{meta['token_count']:,}",
        "atoms": f"{store.num_atoms:,}",
        "dead atoms here": str(sum(summary.frequency == 0 for summary in summaries)),
        "mean non-zeros per coded token": f"{per_coded_token:.1f}",
        "layer": str(meta.get("layer", "unknown")),
        **{name: f"{meta[name]:g}" for name in ("lambda",) if name in meta},
        **{name: str(meta[name]) for name in ("coder",) if name in meta},
        "auxiliary model": f"SHA-256 {meta['fingerprints'].get('auxiliary', 'unknown')[:12]}",
    }
    if "unused_atoms" in health:
        facts["atoms that a sample of the text learned from does not use"] = str(health["unused_atoms"])
    if "reconstruction_error" in health:
        facts["relative reconstruction error"] = f"{health['reconstruction_error']:.4f}"
    return facts


def _quality(path: str) -> dict[str, Any]:
    """What ``mlsm evaluate dictionary`` wrote; ValueError if it is something else."""
    from mlsm_plugin.files.atomic_files import read_json
    from mlsm_plugin.files.json_checks import check_json, fields, number, optional, text

    check = fields(
        {
            "dictionary": fields({"fingerprint": text}),
            "split": text,
            "reconstruction": fields(dict.fromkeys(RECONSTRUCTION_FACTS, optional(number))),
            "loss": optional(fields(dict.fromkeys(LOSS_FACTS, optional(number)))),
        }
    )
    try:
        found: dict[str, Any] = check_json(read_json(path), check, path)
    except ValueError:
        raise ValueError(
            f"{path} is not a file that `mlsm evaluate dictionary --output` wrote; pass that one"
        ) from None
    return found


def _quality_facts(quality: dict[str, Any], store: CodeStore, path: str) -> dict[str, str]:
    judged, coded = quality["dictionary"]["fingerprint"], store.meta["fingerprints"].get("dictionary")
    if judged != coded:
        raise ValueError(
            f"{path} judges another dictionary (SHA-256 {judged[:12]}) than the one of these codes "
            f"({str(coded)[:12]}); run `mlsm evaluate dictionary` with that one"
        )
    options = {"layer": quality.get("layer"), **quality["dictionary"]}
    for name in ("layer", "lambda"):
        if options.get(name) != store.meta.get(name):
            raise ValueError(
                f"{path} judges codes of the same dictionary with {name} {options.get(name)}, but these have "
                f"{store.meta.get(name)}; run `mlsm evaluate dictionary` with the options of `mlsm encode`"
            )
    split, loss = quality["split"], quality["loss"] or {}
    chosen = {label: quality["reconstruction"][name] for name, label in RECONSTRUCTION_FACTS.items()}
    chosen |= {label: loss[name] for name, label in LOSS_FACTS.items() if name in loss}
    shown = {label: "not defined" if value is None else f"{value:.4g}" for label, value in chosen.items()}
    return {f"{label} ({split})": value for label, value in shown.items()}
