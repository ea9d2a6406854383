"""The codes of a dataset or run as a page: which codes these are, what their atoms mean, and the facts about them."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from fairseq import utils
from scipy.sparse import csr_matrix

from mlsm_plugin.core.files.atomic_files import PathLike, read_json
from mlsm_plugin.core.files.json_checks import JsonObject, check_json, fields, number, optional, text
from mlsm_plugin.core.files.model_files import checkpoint_of
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.sparse_coding.code_store import INSPECTED_CHECK, META_FILE, CodeStore
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.core.sparse_coding.stored_codes import CODES_OVER, check_same_codes
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader, BlockSettings
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import config_in, read_state
from mlsm_plugin.fairseq_plugin.compat.resumed_runs import newest_whole
from mlsm_plugin.fairseq_plugin.data.token_blocks import check_codes_belong_to, check_is_coded
from mlsm_plugin.reports.latent_report import AtomSummary, render_report, set_neighbours, summarize_atoms

QUALITY = fields(
    {
        "dictionary": fields({"fingerprint": text}),
        "split": text,
        "reconstruction": fields({"explained_variance": optional(number)}),
        "loss": optional(fields({"ce_loss_score": optional(number)})),
    }
)


def inspect(
    folder: PathLike,
    output: PathLike,
    *,
    split: str = "train",
    codes: PathLike | None = None,
    max_tokens: int = 2_000_000,
    quality: PathLike | None = None,
    dictionary: PathLike | None = None,
) -> list[AtomSummary]:
    """Write an HTML page of what the latent properties mean; returns what it shows of them.

    ``folder`` and ``codes`` are those of :func:`find_codes`; ``quality`` is a file of ``mlsm evaluate dictionary
    --output``, whose figures the page also shows. ``dictionary`` is that of the codes, from which the nearest atoms
    of each are shown; None: one beside the dataset or the codes, if it is that of the codes.

    Raises:
        ValueError: the codes do not belong to the text or the run, or figures or dictionary are those of others.
        OSError: a file is missing, or the page cannot be written.
    """
    figures = None if quality is None else _read_quality(quality)
    data_bin, code_folder = find_codes(Path(folder), None if codes is None else Path(codes), split)
    summaries, store = summarize_split(data_bin, split, code_folder, max_tokens=max_tokens)
    facts = {"data": f"{data_bin.name}, {split}", "tokens": f"{store.num_tokens:,}"}
    if max_tokens < store.num_tokens:
        facts["tokens"] = f"the first {max_tokens:,} of {store.num_tokens:,}"
    facts |= _facts(store, summaries)
    directions = _directions(store, dictionary, [Path(folder), data_bin, data_bin.parent, code_folder])
    if directions is not None:
        set_neighbours(summaries, directions)
    if figures is not None:
        facts |= _quality_facts(figures, store, quality)
    render_report(summaries, title="Latent semantic properties", facts=facts, output_path=output)
    return summaries


def find_codes(folder: Path, chosen: Path | None = None, split: str = "train") -> tuple[Path, Path]:
    """The binarized dataset that ``folder`` is, holds, or was trained on, and the folder of its codes.

    ``chosen`` is the folder of the codes; None: the dataset, that of the run, or the last stage of `mlsm pretrain`.
    FileNotFoundError if there is no such dataset, or it is that of a run in stages without codes; ValueError if the run
    predicts codes over another dictionary than that of ``split``.
    """
    for candidate in (folder, folder / "data-bin"):
        if (candidate / "train.idx").exists() or (candidate / "valid.idx").exists():
            return candidate, chosen or candidate
    if not any(folder.glob("*.pt")):
        raise FileNotFoundError(f"{folder} is neither a binarized dataset nor a run (no train.idx, no checkpoint)")
    newest = newest_whole(folder) if (folder / "stages.json").is_file() else None  # the best may be of another stage
    state = read_state(newest[0] if newest else checkpoint_of(folder))
    task = config_in(state).task
    data = Path(utils.split_paths(task.data)[0])
    codes = Path(utils.split_paths(getattr(task, "latent_codes", None) or task.data)[0])
    if not (data / "dict.txt").exists():
        raise FileNotFoundError(f"{folder} was trained on {data}, which does not exist; pass the binarized dataset")
    if chosen is None and (folder / "stages.json").is_file():
        codes = _codes_of_last_stage(folder, data)
    store = (chosen or codes) / f"{split}.codes"
    if (store / META_FILE).is_file():
        check_same_codes(
            before=state.get("task_state") or {},
            now={CODES_OVER: CodeStore(store).meta.get("fingerprints", {}).get("dictionary")},
            codes=f"the codes in {store}",
            others=f"those that {folder} predicts",
            remedy="pass --codes with those",
        )
    print(f"{folder} was trained on {data}, which is read")
    return data, chosen or codes


def _codes_of_last_stage(folder: Path, data: Path) -> Path:
    """The folder of the last stage that has codes; the best checkpoint may be of an earlier one."""
    stages = sorted(folder.glob("stage-*"), key=lambda path: (len(path.name), path.name), reverse=True)
    if coded := [stage for stage in stages if any(stage.glob(f"*.codes/{META_FILE}"))]:
        return coded[0]
    for stage in stages:
        if (stage / "dictionary" / META_FILE).is_file():
            model = str(stage / "model.pt")
            dictionary = str(stage / "dictionary")
            command = shlex.join(["mlsm", "encode", str(data), "--auxiliary", model, "--dictionary", dictionary])
            raise FileNotFoundError(
                f"{folder} has no stored codes (--latent-source online stores none); make some with "
                f"`{command} --output DIR`, and pass --codes DIR"
            )
    raise FileNotFoundError(f"{folder} has no codes yet; the second stage begins with them")


def summarize_split(
    data_bin: Path, split: str, folder: Path, *, max_tokens: int
) -> tuple[list[AtomSummary], CodeStore]:
    """Summaries of all atoms over the first ``max_tokens`` tokens of a split, and its codes, those in ``folder``."""
    codes = folder / f"{split}.codes"
    check_is_coded(data_bin / split, codes)
    store = CodeStore(codes)
    check_codes_belong_to(data_bin / split, store.meta, codes)
    blocks = check_json(store.meta, INSPECTED_CHECK, codes / META_FILE)["blocks"]
    reader = BlockReader(data_bin, split, BlockSettings(blocks["tokens_per_sample"], blocks["sample_break_mode"]))
    symbols = reader.dictionary.symbols
    summaries = summarize_atoms(
        _coded_blocks(reader, store, max_tokens), num_atoms=store.num_atoms, num_types=len(symbols), symbols=symbols
    )
    return summaries, store


def _coded_blocks(reader: BlockReader, store: CodeStore, max_tokens: int) -> Iterator[tuple[np.ndarray, csr_matrix]]:
    done = 0  # a bar does not count where TQDM_DISABLE is set
    total = min(max_tokens, reader.num_tokens)
    with Progress(total=total, desc="reading codes", unit="token", unit_scale=True) as progress:
        for start, size in zip(reader.starts.tolist(), reader.sizes.tolist(), strict=True):
            if done >= max_tokens:
                break
            yield reader.flat_tokens(start, start + size), store.rows(start, start + size)
            done += size
            progress.update(size)


def _directions(store: CodeStore, dictionary: PathLike | None, places: list[Path]) -> np.ndarray | None:
    """The directions of the atoms; None if no dictionary was passed, and none of these places has that of the codes.

    ValueError if the one that was passed cannot be read, or is another one.
    """
    fingerprint = store.meta["fingerprints"].get("dictionary")
    if dictionary is not None:
        coder = load_coder(dictionary)
        if coder.fingerprint != fingerprint:
            raise ValueError(f"the codes are over another dictionary than {dictionary}; pass the one of `mlsm encode`")
        return coder.directions()
    for place in places:
        if not (place / "dictionary" / META_FILE).is_file():
            continue
        try:
            coder = load_coder(place / "dictionary")
        except (ValueError, OSError):  # not needed for the codes
            continue
        if coder.fingerprint == fingerprint:
            return coder.directions()
    return None


def _facts(store: CodeStore, summaries: list[AtomSummary]) -> dict[str, str]:
    meta = store.meta
    health = meta.get("dictionary_health") or {}
    per_coded_token = meta["mean_nonzeros"] * meta["token_count"] / max(meta["coded_tokens"], 1)
    facts = {
        "atoms": f"{store.num_atoms:,}",
        "dead atoms here": str(sum(summary.frequency == 0 for summary in summaries)),
        "mean non-zeros per coded token": f"{per_coded_token:.1f}",
        "layer": str(meta.get("layer", "unknown")),
        **{name: f"{meta[name]:g}" for name in ("lambda",) if name in meta},
        **{name: str(meta[name]) for name in ("coder",) if name in meta},
        "auxiliary model": _model_name(meta),
    }
    if "unused_atoms" in health:
        facts["atoms that a sample of the text learned from does not use"] = str(health["unused_atoms"])
    if "reconstruction_error" in health:
        facts["relative reconstruction error"] = f"{health['reconstruction_error']:.4f}"
    return facts


def _model_name(meta: JsonObject) -> str:
    """The name of the auxiliary model, if the store says it, and the beginning of its fingerprint."""
    fingerprint = f"SHA-256 {meta['fingerprints'].get('auxiliary', 'unknown')[:12]}"
    return f"{meta['auxiliary']} ({fingerprint})" if isinstance(meta.get("auxiliary"), str) else fingerprint


def _read_quality(path: PathLike) -> JsonObject:
    try:
        quality: JsonObject = check_json(read_json(path), QUALITY, path)
    except ValueError:
        raise ValueError(
            f"{path} is not a file that `mlsm evaluate dictionary --output` wrote; pass that one"
        ) from None
    return quality


def _quality_facts(quality: JsonObject, store: CodeStore, path: object) -> dict[str, str]:
    """The figures by their names, as ``mlsm evaluate dictionary`` prints them."""
    judged = quality["dictionary"]["fingerprint"]
    coded = store.meta["fingerprints"].get("dictionary")
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
    figures = {**quality["reconstruction"], **(quality["loss"] or {})}
    return {
        f"{name} ({quality['split']})": "not defined" if value is None else f"{value:.4g}"
        for name, value in figures.items()
        if value is None or isinstance(value, (int, float))
    }
