"""A binarized dataset with codes, for a report: which codes these are, and what their atoms mean."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from fairseq import utils
from scipy.sparse import csr_matrix

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.json_checks import check_json
from mlsm_plugin.core.files.model_files import checkpoint_of
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.files.step_record import RECORD, StepRecord
from mlsm_plugin.core.masking.word_boundaries import SENTENCEPIECE_BEGIN
from mlsm_plugin.core.sparse_coding.code_store import INSPECTED_CHECK, META_FILE, CodeStore
from mlsm_plugin.core.sparse_coding.stored_codes import CODES_OVER, check_same_codes
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader, BlockSettings
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import config_in, read_state
from mlsm_plugin.fairseq_plugin.compat.model_parts import lm_head
from mlsm_plugin.fairseq_plugin.compat.resumed_runs import newest_whole
from mlsm_plugin.fairseq_plugin.compat.training_options import why_untrained
from mlsm_plugin.fairseq_plugin.data.token_blocks import check_codes_belong_to, check_is_coded
from mlsm_plugin.fairseq_plugin.models.latent_head_model import LatentHead
from mlsm_plugin.hub import from_pretrained
from mlsm_plugin.reports.latent_report import AtomSummary, summarize_atoms
from mlsm_plugin.reports.raised_tokens import CountedBlocks, set_raised_tokens


def find_codes(folder: Path, chosen: Path | None = None, split: str = "train") -> tuple[Path, Path]:
    """Find a binarized dataset and the folder of its codes.

    ``folder`` is the dataset, holds it as ``data-bin``, or is a run that was trained on it. ``chosen`` is the folder of
    the codes; None: the dataset, the run's folder of codes, or the last stage of `mlsm pretrain`. FileNotFoundError if
    there is no such dataset, or a run in stages has no codes; ValueError if the run predicts codes over another
    dictionary than the codes of ``split``.
    """
    for candidate in (folder, folder / "data-bin"):
        if (candidate / "train.idx").exists() or (candidate / "valid.idx").exists():
            return candidate, chosen or candidate
    if not any(folder.glob("*.pt")):
        raise FileNotFoundError(f"{folder} is neither a binarized dataset nor a run (no train.idx, no checkpoint)")
    state = read_state(_checkpoint_of(folder))
    task = config_in(state).task
    data = Path(utils.split_paths(task.data)[0])
    codes = Path(utils.split_paths(getattr(task, "latent_codes", None) or task.data)[0])
    if not (data / "dict.txt").exists():
        raise FileNotFoundError(f"{folder} was trained on {data}, which does not exist; pass the binarized dataset")
    if chosen is None and _is_in_stages(folder):
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
    print(f"{folder} was trained on {data}, so that is read")
    return data, chosen or codes


def _checkpoint_of(run: Path) -> Path:
    """The checkpoint that predicts the codes of a run: in stages, the newest, as the best may be of another stage."""
    newest = newest_whole(run) if _is_in_stages(run) else None
    return newest[0] if newest else checkpoint_of(run)


def _is_in_stages(run: Path) -> bool:
    return bool(StepRecord(run / RECORD).settings_of("stages"))


def _codes_of_last_stage(folder: Path, data: Path) -> Path:
    """The folder of the last stage with codes; the best checkpoint may belong to an earlier stage."""
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
    data_bin: Path, split: str, folder: Path, *, max_tokens: int, run: Path | None = None
) -> tuple[list[AtomSummary], CodeStore]:
    """Summaries of all atoms over the first ``max_tokens`` tokens of a split, and its codes, from ``folder``.

    If ``run`` is a training run that predicts these codes and tokens, its heads give the tokens that each atom raises.
    """
    codes = folder / f"{split}.codes"
    check_is_coded(data_bin / split, codes)
    store = CodeStore(codes)
    check_codes_belong_to(data_bin / split, store.meta, codes)
    blocks = check_json(store.meta, INSPECTED_CHECK, codes / META_FILE)["blocks"]
    reader = BlockReader(data_bin, split, BlockSettings(blocks["tokens_per_sample"], blocks["sample_break_mode"]))
    symbols = reader.dictionary.symbols
    blocks = CountedBlocks(_coded_blocks(reader, store, max_tokens), len(symbols))
    summaries = summarize_atoms(blocks, num_atoms=store.num_atoms, num_types=len(symbols), symbols=symbols)
    if run is not None and any(run.glob("*.pt")):
        _set_raised_tokens(summaries, store, run, symbols, blocks.counts)
    return summaries, store


def _set_raised_tokens(
    summaries: list[AtomSummary], store: CodeStore, run: Path, symbols: list[str], counts: np.ndarray
) -> None:
    """Set the tokens that each atom raises, if the run can be opened and predicts both these atoms and tokens."""
    try:
        checkpoint = _checkpoint_of(run)
        predicted = (read_state(checkpoint).get("task_state") or {}).get(CODES_OVER)
        interface = from_pretrained(checkpoint)
    except (ValueError, OSError):
        return
    if predicted not in (None, store.meta.get("fingerprints", {}).get("dictionary")):
        return  # codes over another dictionary
    if getattr(interface, "num_atoms", 0) != len(summaries) or why_untrained(interface.cfg) is not None:
        return
    head = lm_head(interface.model)
    assert isinstance(head, LatentHead)
    assert head.atom_projection is not None
    set_raised_tokens(summaries, head.atom_projection.weight, head.token_logits, symbols, counts)


def property_names(data_bin: PathLike, *, split: str = "train", max_tokens: int = 200_000) -> list[str]:
    """Names of all latent properties in the codes of a dataset, by number: the most telling words of each.

    They come from the first ``max_tokens`` tokens; a property that occurs in none of them gets an empty name. Raises
    the errors of :func:`summarize_split`.

    Example::

        >>> names = property_names("data-bin")
        >>> [names[atom] for atom, weight in model.latent_properties("a black <mask> barked", topk=2)[2].atoms]
        ['dog, cat, horse', 'barked, howled, said']
    """
    summaries, _ = summarize_split(Path(data_bin), split, Path(data_bin), max_tokens=max_tokens)
    return [name_of(summary) for summary in summaries]


def name_of(summary: AtomSummary) -> str:
    """The most telling words of a latent property, such as ``dog, cat, horse``; empty if no token has it."""
    return ", ".join(piece.replace(SENTENCEPIECE_BEGIN, "") for piece in summary.label)


def _coded_blocks(reader: BlockReader, store: CodeStore, max_tokens: int) -> Iterator[tuple[np.ndarray, csr_matrix]]:
    done = 0  # counted here: with TQDM_DISABLE, the progress bar does not count
    total = min(max_tokens, reader.num_tokens)
    with Progress(total=total, desc="reading codes", unit="token", unit_scale=True) as progress:
        for start, size in zip(reader.starts.tolist(), reader.sizes.tolist(), strict=True):
            if done >= max_tokens:
                break
            end = start + min(size, max_tokens - done)
            yield reader.flat_tokens(start, end), store.rows(start, end)
            done += end - start
            progress.update(end - start)
