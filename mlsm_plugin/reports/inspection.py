"""A page on the codes of a dataset or run: which codes these are, what their atoms mean, and facts about them."""

from pathlib import Path

import numpy as np

from mlsm_plugin.core.files.atomic_files import PathLike, read_json
from mlsm_plugin.core.files.json_checks import JsonObject, check_json, fields, number, optional, text
from mlsm_plugin.core.sparse_coding.atom_names import read_names
from mlsm_plugin.core.sparse_coding.code_store import META_FILE, CodeStore
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.reports.adapted_texts import coded_part, is_adaptation, summarize_adaptation
from mlsm_plugin.reports.latent_report import AtomSummary, render_report, set_neighbours

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
    names: PathLike | None = None,
) -> list[AtomSummary]:
    """Write an HTML page on what the latent properties mean; returns the summaries that it shows.

    Args:
        folder: output of ``mlsm adapt``; or, with fairseq, a folder for
            :func:`~mlsm_plugin.reports.coded_datasets.find_codes`.
        output: file of the page.
        split: part of the text.
        codes: folder of the codes, as ``chosen`` in ``find_codes``.
        max_tokens: number of tokens to read, from the beginning.
        quality: file that ``mlsm evaluate dictionary --output`` wrote; the page shows its figures.
        dictionary: dictionary of the codes, from which the page shows the nearest atoms of each atom; None: a
            dictionary beside the dataset or the codes, if it belongs to the codes.
        names: file or folder for :func:`~mlsm_plugin.core.sparse_coding.atom_names.read_names`.

    Raises:
        ValueError: the codes do not belong to the text or the run; or figures, dictionary or names to other codes.
        OSError: a file is missing, or the page cannot be written.
    """
    figures = None if quality is None else _read_quality(quality)
    data, code_folder, summaries, store, num_tokens = _summarized(Path(folder), codes, split, max_tokens)
    if names is not None:
        for atom, name in read_names(names, len(summaries)).items():
            summaries[atom].name = name
    facts = {"data": f"{data.name}, {split}", "tokens": f"{num_tokens:,}"}
    if max_tokens < num_tokens:
        facts["tokens"] = f"the first {max_tokens:,} of {num_tokens:,}"
    facts |= _facts(store, summaries)
    directions = _directions(store, dictionary, [Path(folder), data, data.parent, code_folder])
    if directions is not None:
        set_neighbours(summaries, directions)
    if figures is not None:
        facts |= _quality_facts(figures, store, quality)
    render_report(summaries, title="Latent semantic properties", facts=facts, output_path=output)
    return summaries


def _summarized(
    folder: Path, codes: PathLike | None, split: str, max_tokens: int
) -> tuple[Path, Path, list[AtomSummary], CodeStore, int]:
    """The data in a folder, the folder of the codes, the summaries of all atoms over them, the codes, and the tokens.

    The number of tokens is that of the text, which a student may cut into others than the teacher of the codes.
    """
    if is_adaptation(folder):
        if codes is not None:
            raise ValueError(f"{folder} is the output of `mlsm adapt`, which has its codes; leave --codes out")
        summaries, store = summarize_adaptation(folder, split, max_tokens=max_tokens)
        return folder, folder, summaries, store, coded_part(folder, split).sequences.num_tokens
    from mlsm_plugin.reports.coded_datasets import find_codes, summarize_split

    data_bin, code_folder = find_codes(folder, None if codes is None else Path(codes), split)
    summaries, store = summarize_split(data_bin, split, code_folder, max_tokens=max_tokens, run=folder)
    return data_bin, code_folder, summaries, store, store.num_tokens


def _directions(store: CodeStore, dictionary: PathLike | None, places: list[Path]) -> np.ndarray | None:
    """The directions of the atoms; None if no dictionary was passed, and ``places`` lack the dictionary of the codes.

    ValueError if the passed dictionary cannot be read, or belongs to other codes.
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
        except (ValueError, OSError):  # the page can do without it
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
    }
    if "lambda" in meta:
        facts["lambda"] = f"{meta['lambda']:g}"
    if "coder" in meta:
        facts["coder"] = str(meta["coder"])
    facts["auxiliary model"] = _model_name(meta)
    if "unused_atoms" in health:
        facts["atoms that a sample of the text learned from does not use"] = str(health["unused_atoms"])
    if "reconstruction_error" in health:
        facts["relative reconstruction error"] = f"{health['reconstruction_error']:.4f}"
    return facts


def _model_name(meta: JsonObject) -> str:
    """The name of the auxiliary model, if the store records it, and the beginning of its fingerprint."""
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
    """The figures by name, as ``mlsm evaluate dictionary`` prints them; ValueError if they are of other codes."""
    judged_fingerprint = quality["dictionary"]["fingerprint"]
    coded_fingerprint = store.meta["fingerprints"].get("dictionary")
    if judged_fingerprint != coded_fingerprint:
        raise ValueError(
            f"{path} judges another dictionary (SHA-256 {judged_fingerprint[:12]}) than the one of these codes "
            f"({str(coded_fingerprint)[:12]}); run `mlsm evaluate dictionary` with that one"
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
