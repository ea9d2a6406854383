"""Which tokens are coded, which atoms of a code are kept, and codes in the types of the store's files."""

import numpy as np
import scipy.sparse as sp

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.sparse_coding.encode import target_distribution

INDPTR_DTYPE = np.dtype(np.uint32)
WEIGHT_DTYPE = np.dtype(np.float16)
CODES_OVER = "codes_over"  # key in a task's state for the dictionary's fingerprint; other settings of codes: codes_*
NO_POSITION = -1  # position of a token that has no row in the code store, such as a prepended BOS or padding


def atom_dtype(num_atoms: int) -> np.dtype:
    """The integer type of stored atoms: uint16 if it can number all atoms, else uint32."""
    return np.dtype(np.uint16 if num_atoms <= 2**16 else np.uint32)


def recorded_coverage(meta: JsonObject, directory: PathLike) -> tuple[float, int]:
    """The share of positions that a code store covers, and its seed, from its ``meta.json``.

    ValueError if the share is below 1 and the seed is missing.
    """
    coverage = float(meta.get("coverage", 1.0))
    seed = meta.get("coverage_seed")
    if coverage < 1 and seed is None:
        raise ValueError(f"{directory}/meta.json gives the coverage {coverage} but no coverage_seed; encode again")
    return coverage, int(seed or 0)


def origin_of(meta: JsonObject, top: int | None) -> JsonObject:
    """Everything that decides codes, from their store's ``meta.json`` and the number ``top`` of atoms to keep.

    It is part of a task's state.
    """
    known = {**meta, **meta.get("fingerprints", {})}
    tops = [number for number in (meta.get("latent_top"), top) if number]
    names = ("auxiliary", "alignment", "layer", "lambda", "coder", "activation", "latent_select")
    settings = {f"codes_{name}": known.get(name) for name in names}
    return {CODES_OVER: known.get("dictionary"), **settings, "codes_latent_top": min(tops, default="all")}


def check_same_codes(before: JsonObject, now: JsonObject, codes: str, others: str, remedy: str) -> None:
    """Raise ValueError if two states of a task differ in an entry about codes that both have."""
    for name in (name for name in now if name.startswith("codes_")):
        if None not in (now[name], before.get(name)) and now[name] != before[name]:
            what = "over another dictionary (SHA-256 " if name == CODES_OVER else f"of another {name[6:]} ("
            actual = str(now[name])[:12]
            expected = str(before[name])[:12]
            raise ValueError(f"{codes} are {what}{actual}) than {others} ({expected}); {remedy}")


def covered_positions(positions: np.ndarray, *, coverage: float, seed: int) -> np.ndarray:
    """Whether each position belongs to the seeded share, (n,) bool; ValueError if a setting is out of range.

    A hash of (seed, position) decides for each position independently (SplitMix64: Steele, Lea and Flood, 2014). The
    choice therefore does not depend on shards or ranks, and with the same seed, a larger coverage contains a smaller
    coverage.

    Args:
        positions: (n,) int, flat token positions of a split; negative positions (no position) are never covered.
        coverage: expected share of the positions, in (0, 1]; 1 covers all.
        seed: any integer in [0, 2^63).
    """
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage must be in (0, 1], got {coverage}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be in [0, 2^63), got {seed}")
    positions = np.asarray(positions)
    if coverage == 1:
        return positions >= 0
    state = positions.astype(np.uint64) + _mix(np.array([seed], np.uint64))
    return (_mix(state) < np.uint64(int(coverage * 2.0**64))) & (positions >= 0)


def _mix(state: np.ndarray) -> np.ndarray:
    """One output of SplitMix64 for each state (uint64; overflow is intended)."""
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def without_negative_codes(codes: sp.csr_matrix) -> sp.csr_matrix:
    """Empty the codes (n, n_atoms) that have a negative weight, since they cannot become a distribution."""
    if codes.nnz == 0 or codes.data.min() >= 0:
        return codes
    rows = np.repeat(np.arange(codes.shape[0]), np.diff(codes.indptr))
    return _only(codes, ~np.isin(rows, rows[codes.data < 0]))


def check_top(top: int | None) -> None:
    """Raise ValueError unless ``top``, the number of atoms to keep of a code, is at least 1 or None (all)."""
    if top is not None and top < 1:
        raise ValueError(f"--latent-top must be at least 1, got {top}")


def strongest(codes: sp.csr_matrix, top: int | None) -> sp.csr_matrix:
    """Keep the ``top`` atoms with the largest weights of each code (None: all); their weights do not change.

    ``codes`` are (n, n_atoms), non-negative, with sorted columns. Among equal weights, the first is kept.
    """
    if top is None or codes.nnz == 0:
        return codes
    lengths = np.diff(codes.indptr)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    order = np.lexsort((codes.indices, -codes.data, rows))
    rank = np.arange(codes.nnz) - np.repeat(codes.indptr[:-1], lengths)  # within its row, in this order
    kept = np.zeros(codes.nnz, bool)
    kept[order[rank < top]] = True
    return _only(codes, kept)


def _only(codes: sp.csr_matrix, kept: np.ndarray) -> sp.csr_matrix:
    """The codes with only the entries that are ``kept`` (nnz,) bool."""
    indptr = np.concatenate([[0], np.cumsum(kept)])[codes.indptr]
    return sp.csr_matrix((codes.data[kept], codes.indices[kept], indptr), shape=codes.shape)


def strongest_of_padded(atoms: np.ndarray, weights: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``top`` atoms with the largest weights of each row of stored codes, normalized to distributions again.

    ``atoms`` (n, m) int32 are padded with -1, and ``weights`` (n, m) float16 with 0; so are the results, which are
    (n, min(m, top)).
    """
    if atoms.shape[1] <= top:
        return atoms, weights
    kept = np.sort(np.argsort(-weights, axis=1, kind="stable")[:, :top], axis=1)
    weights = np.take_along_axis(weights, kept, axis=1).astype(np.float32)
    sums = weights.sum(axis=1, keepdims=True)
    weights = (weights / np.where(sums > 0, sums, 1)).astype(np.float16)
    return np.take_along_axis(atoms, kept, axis=1), weights


def stored_form(codes: sp.csr_matrix) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The number of non-zeros of each row of ``codes``, and their atoms and weights, in the types of the files.

    ValueError if weights are negative or not finite.
    """
    codes = sp.csr_matrix(codes, copy=True)
    codes.sum_duplicates()  # sorts as well
    if not (np.isfinite(codes.data).all() and (codes.data >= 0).all()):
        raise ValueError("codes must be finite and >= 0, as they become distributions")
    distribution = target_distribution(codes)
    weights = distribution.data.astype(WEIGHT_DTYPE)
    kept = _only(distribution, weights > 0)
    return np.diff(kept.indptr), kept.indices.astype(atom_dtype(codes.shape[1])), weights[weights > 0]


def padded_distributions(codes: sp.csr_matrix) -> tuple[np.ndarray, np.ndarray]:
    """Convert non-negative codes (n, n_atoms) to rows of equal length, normalized and rounded as in the code store.

    Returns atoms (n, m) int32 padded with -1, and weights (n, m) float16 padded with 0; m is the longest row's length.
    """
    lengths, flat_atoms, flat_weights = stored_form(codes)
    filled = np.arange(lengths.max(initial=0)) < lengths[:, None]  # (n, m)
    atoms = np.full(filled.shape, -1, np.int32)
    weights = np.zeros(filled.shape, np.float16)
    atoms[filled] = flat_atoms
    weights[filled] = flat_weights
    return atoms, weights


class ShardRows:
    """The codes of a shard's tokens in the types of the files, added in the order of the tokens.

    A run holds these in memory until the shard is written: 4 bytes per non-zero (6 with uint32 atoms), 8 per token.
    """

    def __init__(self, num_tokens: int, num_atoms: int) -> None:
        self.shape = (num_tokens, num_atoms)
        self.coded_tokens = self._filled = 0  # number of added rows, and the first row that can follow them
        self.nonzeros = 0  # weights of these rows that did not round to 0
        self.gap_sum = self.gap_max = 0.0
        self.has_gaps = True  # whether all rows came with gaps
        self._counts = np.zeros(num_tokens, np.int64)
        self._atoms: list[np.ndarray] = [np.zeros(0, atom_dtype(num_atoms))]
        self._weights: list[np.ndarray] = [np.zeros(0, WEIGHT_DTYPE)]

    def add(self, rows: np.ndarray, codes: sp.csr_matrix, gap: np.ndarray | None = None) -> None:
        """Add codes, divided by their sums and rounded to float16; weights that round to 0 are left out.

        ValueError if shapes do not fit, or the rows do not ascend or are outside the shard.

        Args:
            rows: (n,) int, tokens of the shard, ascending, and all after the rows already added.
            codes: (n, n_atoms), finite and non-negative.
            gap: (n,) relative duality gaps, if the coder certifies its codes.
        """
        expected = (len(rows), self.shape[1])
        if codes.shape != expected or (gap is not None and len(gap) != len(rows)):
            raise ValueError(f"codes must have the shape {expected} (rows, atoms) and a gap each, got {codes.shape}")
        if len(rows) == 0:
            return
        if rows[0] < self._filled or rows[-1] >= self.shape[0] or (np.diff(rows) <= 0).any():
            raise ValueError(f"rows must ascend from {self._filled} to at most {self.shape[0] - 1}")
        counts, atoms, weights = stored_form(codes)
        self._counts[rows] = counts
        self._atoms.append(atoms)
        self._weights.append(weights)
        self._filled = int(rows[-1]) + 1
        self.coded_tokens += len(rows)
        self.nonzeros += len(atoms)
        if gap is None:
            self.has_gaps = False
        else:
            self.gap_sum += float(np.sum(gap, dtype=np.float64))
            self.gap_max = max(self.gap_max, float(np.max(gap)))

    def arrays(self) -> dict[str, np.ndarray]:
        """The three arrays of the files; ValueError if there are more non-zeros than uint32 can count."""
        limit = np.iinfo(INDPTR_DTYPE).max
        if self.nonzeros > limit:
            raise ValueError(f"a shard holds at most {limit} non-zeros, got {self.nonzeros}; use more shards")
        return {
            "indptr": np.concatenate([[0], np.cumsum(self._counts)]).astype(INDPTR_DTYPE),
            "atoms": np.concatenate(self._atoms),
            "weights": np.concatenate(self._weights),
        }

    def figures(self, *, with_gaps: bool) -> JsonObject:
        """The content of the JSON file of the shard."""
        gaps = {"gap_sum": self.gap_sum, "gap_max": self.gap_max} if with_gaps else {}
        return {"coded_tokens": self.coded_tokens, **gaps}
