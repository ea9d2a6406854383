"""The only writer of the code store; :mod:`~mlsm_plugin.core.sparse_coding.code_store` documents the format."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import scipy.sparse as sp

from mlsm_plugin.core.files.atomic_files import PathLike, read_json
from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.files.npy_files import npy_header
from mlsm_plugin.core.files.planned_folder import PlannedFolder, shorten
from mlsm_plugin.core.files.sharded_store import ShardedStoreWriter, shard_path
from mlsm_plugin.core.sparse_coding.stored_codes import INDPTR_DTYPE, WEIGHT_DTYPE, ShardRows, atom_dtype

FORMAT_VERSION = 1
PARTS = ("atoms", "weights", "indptr")  # in the order of writing; if an indptr exists, the other two are complete
# The order of the keys in the files, whatever their order in memory; other keys come after these.
META_KEYS = (
    "n_atoms",
    "lambda",
    "layer",
    "coverage",
    "coverage_seed",
    "solver",
    "tolerance",
    "max_nonzeros",
    "fp16",
    "blocks",
    "dictionary_health",
    "fingerprints",
    "format_version",
    "token_count",
    "nnz",
    "mean_nonzeros",
    "coded_tokens",
    "gap_mean",
    "gap_max",
    "shards",
)


class CodeStoreWriter(ShardedStoreWriter):
    """Writes a store shard by shard, in any order, in any number of runs and processes.

    Nothing is written before the first shard, so a run that fails earlier leaves no files. ValueError if the
    boundaries or ``n_atoms`` are invalid, or the folder was begun with another plan.

    Args:
        meta: description of the codes (JSON values). ``n_atoms`` is required.
        boundaries: offsets of the shards in tokens, strictly ascending; the first is 0, the last the token count.
        with_gaps: whether each shard comes with the duality gaps of its codes, whose mean and maximum go to
            ``meta.json``; otherwise it has only the number of coded tokens.
    """

    parts = PARTS

    def __init__(
        self, directory: PathLike, meta: JsonObject, boundaries: Sequence[int], *, with_gaps: bool = False
    ) -> None:
        self.boundaries = [int(offset) for offset in boundaries]
        if len(self.boundaries) < 2 or self.boundaries[0] != 0 or (np.diff(self.boundaries) <= 0).any():
            raise ValueError(
                f"boundaries must start at 0 and ascend strictly to the token count, got {shorten(self.boundaries)}"
            )
        if not isinstance(meta.get("n_atoms"), int) or meta["n_atoms"] < 1:
            raise ValueError(f"meta must give the size of the dictionary as n_atoms >= 1, got {meta.get('n_atoms')!r}")
        plan = {"format_version": FORMAT_VERSION, "meta": _in_order(meta), "boundaries": self.boundaries}
        folder = PlannedFolder(directory, plan)
        super().__init__(folder, len(self.boundaries) - 1)
        self.meta: JsonObject = folder.plan["meta"]
        self.num_atoms: int = self.meta["n_atoms"]
        self.with_gaps = with_gaps

    def missing_shards(self) -> list[tuple[int, int, int]]:
        """(index, start, stop) of each shard whose files are missing, truncated or do not fit together."""
        return [(index, self.boundaries[index], self.boundaries[index + 1]) for index in self.missing()]

    def write_shard(self, index: int, codes: sp.csr_matrix | ShardRows) -> None:
        """Write the codes of one shard's tokens; each row is divided by its sum and rounded to float16.

        Weights that round to 0 are left out. The files appear one by one, ``indptr`` last. ValueError if the shard does
        not exist, the shape is wrong, weights are negative or not finite, there are more non-zeros than uint32 can
        count, gaps are missing in a store with gaps, or another process began the store with another plan.

        ``codes`` are (tokens of the shard, n_atoms), non-negative; an empty row has no target. In a matrix, rows that
        are not empty count as coded; in :class:`ShardRows`, rows that were added.
        """
        if not 0 <= index < self.num_shards:
            raise ValueError(f"there is no shard {index}; the plan has 0 to {self.num_shards - 1}")
        expected = (self.boundaries[index + 1] - self.boundaries[index], self.num_atoms)
        if codes.shape != expected:
            raise ValueError(f"shard {index} must have the shape {expected} (tokens, atoms), got {codes.shape}")
        rows = codes if isinstance(codes, ShardRows) else ShardRows(*expected)
        if not isinstance(codes, ShardRows):
            coded = np.flatnonzero(np.diff(sp.csr_matrix(codes).indptr))
            rows.add(coded, codes[coded])
        if self.with_gaps and not rows.has_gaps:
            raise ValueError(f"shard {index} lacks the duality gaps of its codes; add them, or use with_gaps=False")
        self._write_parts(index, rows.arrays(), {"gap": rows.figures(with_gaps=self.with_gaps)})

    def finish(self, auxiliary_name: str | None = None) -> JsonObject:
        """Remove the leftovers of interrupted runs, seal the store with ``meta.json``, and return its content.

        ``auxiliary_name`` is recorded unless the store is sealed already, since a moved model is the same. May be
        called again, and by several processes at the same time; all write the same bytes. MissingShardsError, a
        ValueError, names missing shards; ValueError if no token was coded, or all codes are empty.
        """
        whole = self._whole_shards()
        shards = []
        for (start, stop), (nonzeros, sizes, _) in zip(pairwise(self.boundaries), whole, strict=True):
            shards.append({"start": start, "stop": stop, "nnz": nonzeros, "bytes": sizes})
        figures = [of_shard for _, _, of_shard in whole]
        nnz = sum(shard["nnz"] for shard in shards)
        coded_tokens = sum(of_shard["coded_tokens"] for of_shard in figures)
        totals: JsonObject = {
            "format_version": FORMAT_VERSION,
            "token_count": self.boundaries[-1],
            "nnz": nnz,
            "mean_nonzeros": nnz / self.boundaries[-1],
            "coded_tokens": coded_tokens,
            "shards": shards,
        }
        if self.with_gaps:
            totals["gap_mean"] = sum(of_shard["gap_sum"] for of_shard in figures) / max(1, coded_tokens)
            totals["gap_max"] = max(of_shard["gap_max"] for of_shard in figures)
        name = self._recorded_name(auxiliary_name)
        if name is not None:
            totals["auxiliary"] = name
        meta = _in_order({**self.meta, **totals})
        if nnz == 0 and coded_tokens:
            raise ValueError(
                f"all {coded_tokens} codes of {self.directory} are empty; "
                "delete the folder and encode with other settings of the coder"
            )
        if meta.get("coverage", 1) < 1 and not coded_tokens:
            raise ValueError(
                f"no token of {self.directory} was coded; delete the folder and encode with more --coverage"
            )
        self.folder.seal(meta)
        return meta

    def whole_shard(self, index: int) -> tuple[int, dict[str, int], JsonObject] | None:
        """The non-zeros, the bytes of each file and the figures of a shard, or None if its files are not whole."""
        atoms = npy_header(self._path(index, "atoms"))
        weights = npy_header(self._path(index, "weights"))
        indptr = npy_header(self._path(index, "indptr"))
        if atoms is None or weights is None or indptr is None:
            return None
        num_tokens = self.boundaries[index + 1] - self.boundaries[index]
        if indptr.shape != (num_tokens + 1,) or indptr.dtype != INDPTR_DTYPE:
            return None
        try:
            ends = np.memmap(self._path(index, "indptr"), INDPTR_DTYPE, "r", indptr.offset, indptr.shape)[[0, -1]]
        except (OSError, ValueError):  # another process is replacing it
            return None
        fits = (
            ends[0] == 0
            and atoms.shape == weights.shape == (int(ends[1]),)
            and atoms.dtype == atom_dtype(self.num_atoms)
            and weights.dtype == WEIGHT_DTYPE
        )
        figures = self._figures(index)
        if not fits or figures is None:
            return None
        sizes = {"atoms": atoms.file_size, "indptr": indptr.file_size, "weights": weights.file_size}
        return int(ends[1]), sizes, figures

    def _figures(self, index: int) -> JsonObject | None:
        names = ("coded_tokens", "gap_sum", "gap_max") if self.with_gaps else ("coded_tokens",)
        try:
            figures = read_json(shard_path(self.directory, index, "gap", "json"))
        except (OSError, ValueError):
            return None
        whole = isinstance(figures, dict) and all(isinstance(figures.get(name), (int, float)) for name in names)
        return {name: figures[name] for name in names} if whole else None

    def _recorded_name(self, auxiliary_name: str | None) -> str | None:
        """The model's name, or None, as in the seal; ``auxiliary_name`` if there is no seal, or it is damaged."""
        if not self.folder.is_sealed:
            return auxiliary_name
        try:
            name = self.folder.sealed_content().get("auxiliary")
        except ValueError:
            return auxiliary_name
        return name if isinstance(name, str) else None


def _in_order(meta: JsonObject) -> JsonObject:
    """``meta`` with its keys in the order of the files."""
    known = {key: meta[key] for key in META_KEYS if key in meta}
    return {**known, **{key: value for key, value in meta.items() if key not in known}}
