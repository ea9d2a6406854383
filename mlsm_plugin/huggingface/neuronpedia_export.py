"""Write stored codes and their text as the folder that Neuronpedia imports: a page for each atom, with its examples.

The folder ``MODEL/LAYER-SET`` has the layout of Neuronpedia's own exports. A line of a file is a row of a table of its
database; columns that are left out get the default of the database.

- ``release.jsonl``, ``model.jsonl``, ``sourceset.jsonl`` and ``source.jsonl``: one row each;
- ``features/batch-0.jsonl.gz``, ...: a row for each atom, also for dead atoms, 1,024 in a file;
- ``activations/batch-0.jsonl.gz``, ...: the examples of these atoms: a part of the text, with the weight on each token.
  There is no file for a batch of dead atoms, since Neuronpedia's importer fails at an empty file.
"""

import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_directory
from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceSource
from mlsm_plugin.core.sparse_coding.atom_examples import BARS, INTERVALS, PART, AtomExamples, Examples, find_examples
from mlsm_plugin.huggingface.coded_text import CodedText, open_coded_text

FEATURES_OF_FILE = 1024  # as in Neuronpedia
DIGITS = 5  # of weights, after the point
CREATOR = "clkht01d40000jv08hvalcvly"  # the user that owns what is imported, in every installation of Neuronpedia
OF_STRONGEST = -1  # stands for the bounds of an interval in rows of the strongest examples
NAME_OF_SET = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
METADATA = ("release.jsonl", "model.jsonl", "sourceset.jsonl", "source.jsonl")
EXPLANATIONS = "explanations"


@dataclass(frozen=True)
class NeuronpediaExport:
    """A written folder, and the numbers of its features and examples."""

    folder: Path
    features: int
    examples: int


def write_neuronpedia_export(
    codes: PathLike, sequences: PathLike, model: PathLike, output: PathLike, source_set: str, *, overwrite: bool = False
) -> NeuronpediaExport:
    """Write the codes of token sequences for Neuronpedia, to the folder ``MODEL/LAYER-SET`` in ``output``.

    An atom has up to 20 examples with the largest weights, and up to 5 drawn from each fifth of the range of its
    weights. An example is at most 128 tokens of a sequence. The memory does not grow with the text.

    Args:
        codes, sequences, model: as for :func:`open_coded_text`.
        output: folder for the folder of the model.
        source_set: name of the set, such as ``res-mlsm``.
        overwrite: replace an existing export.

    Raises:
        ValueError: the codes belong to other sequences or another model, are all empty or do not record their layer; a
            name is not one that Neuronpedia takes; or an export exists (with ``overwrite``: with explanations).
    """
    if not NAME_OF_SET.fullmatch(source_set):
        raise ValueError(
            f"--neuronpedia takes the name of a set, such as res-mlsm: up to 64 of a-z, 0-9, - and _, got "
            f"{source_set[:80]!r}"
        )
    coded_text = open_coded_text(codes, sequences, model)
    names = _Names(_model_id(coded_text.model), source_set, _layer_of(coded_text))
    folder = Path(output) / names.model / names.source
    _check_folder(folder, overwrite=overwrite)
    examples = find_examples(coded_text.codes, coded_text.text.starts)
    if not examples.occurrences.any():
        raise ValueError(f"no token has a code in {codes}; there is nothing to show")
    with atomic_directory(folder) as temporary:
        for file_name, row in zip(METADATA, _metadata(names, coded_text, examples, str(sequences)), strict=True):
            (temporary / file_name).write_bytes(_line(row))
        _write_batches(temporary, names, coded_text, examples)
    return NeuronpediaExport(folder, coded_text.codes.num_atoms, len(examples.strongest) + len(examples.drawn))


@dataclass(frozen=True)
class _Names:
    """What Neuronpedia calls the model, the set of sources and the layer."""

    model: str
    source_set: str
    layer: int

    @property
    def source(self) -> str:
        return f"{self.layer}-{self.source_set}"

    def row(self, atom: int) -> JsonObject:
        """The columns by which a row of a feature or an example names its feature."""
        return {"modelId": self.model, "layer": self.source, "index": str(atom), "creatorId": CREATOR}


def _model_id(model: str) -> str:
    """The name of a model as Neuronpedia's identifier."""
    path = Path(model)
    name = path.resolve().name if path.is_dir() else path.name
    identifier = re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-_")[:128]
    if not identifier:
        raise ValueError(f"Neuronpedia names models with a-z, 0-9, - and _, and {name!r} has none; rename the folder")
    return identifier


def _layer_of(coded_text: CodedText) -> int:
    layer = coded_text.codes.meta.get("layer")
    if layer is None:
        raise ValueError("the codes do not record their layer; code the sequences again with `mlsm encode`")
    return int(layer)


def _check_folder(folder: Path, *, overwrite: bool) -> None:
    """Raise ValueError if a folder is in use; explanations are kept, but would be of other features."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise ValueError(f"{folder} exists already; name another output, or pass --overwrite to replace it")
    if (folder / EXPLANATIONS).exists():
        raise ValueError(f"{folder / EXPLANATIONS} belongs to the features that would be replaced; move it away first")


def _metadata(names: _Names, coded_text: CodedText, examples: AtomExamples, dataset: str) -> list[JsonObject]:
    """The rows of the release, the model, the set and the source."""
    description = f"Latent properties of layer {names.layer} of {names.model}"
    author = {"creatorId": CREATOR, "creatorName": "mlsm_plugin", "visibility": "PUBLIC"}
    release = {"name": names.source_set, "description": description, "descriptionShort": description, "urls": []}
    model = {
        "id": names.model,
        "displayName": names.model,
        "displayNameShort": names.model,
        "creatorId": CREATOR,
        "visibility": "PUBLIC",
        "layers": HuggingFaceSource.layers_of(coded_text.model),
        "neuronsPerLayer": 0,
        "dimension": HuggingFaceSource.width_of(coded_text.model),
        "owner": "",
    }
    source_set = {
        "modelId": names.model,
        "name": names.source_set,
        "description": description,
        "releaseName": names.source_set,
        "urls": [],
    }
    source = {
        "id": names.source,
        "modelId": names.model,
        "setName": names.source_set,
        "creatorId": CREATOR,
        "visibility": "PUBLIC",
        "dataset": dataset,
        "num_prompts": examples.parts,
        "num_tokens_in_prompt": PART,
    }
    return [{**release, **author}, model, {**source_set, **author}, source]


def _write_batches(folder: Path, names: _Names, coded_text: CodedText, examples: AtomExamples) -> None:
    """Write the files of features and examples."""
    num_atoms = coded_text.codes.num_atoms
    reader = _ExampleReader(coded_text, names)
    (folder / "features").mkdir()
    (folder / "activations").mkdir()
    with Progress(total=num_atoms, desc="writing", unit="feature") as progress:
        for number, first in enumerate(range(0, num_atoms, FEATURES_OF_FILE)):
            atoms = range(first, min(first + FEATURES_OF_FILE, num_atoms))
            name = f"batch-{number}.jsonl.gz"
            with _gzip_file(folder / "features" / name) as file:
                file.writelines(_line(_feature(names, coded_text, examples, atom)) for atom in atoms)
            if examples.occurrences[atoms.start : atoms.stop].any():
                with _gzip_file(folder / "activations" / name) as file:
                    for atom in atoms:
                        file.writelines(map(_line, reader.rows(examples, atom)))
            progress.update(len(atoms))


def _feature(names: _Names, coded_text: CodedText, examples: AtomExamples, atom: int) -> JsonObject:
    """The row of an atom."""
    largest = float(examples.largest[atom])
    coded_tokens = max(int(coded_text.codes.meta["coded_tokens"]), 1)
    bars = examples.bars[atom] if largest else np.zeros(0, dtype=np.int64)
    middles = (np.arange(len(bars)) + 0.5) / BARS * largest
    return {
        **names.row(atom),
        "sourceSetName": names.source_set,
        "maxActApprox": round(largest, DIGITS),
        "frac_nonzero": float(examples.occurrences[atom]) / coded_tokens,
        "freq_hist_data_bar_heights": bars.tolist(),
        "freq_hist_data_bar_values": _rounded(middles),
        "pos_str": [],
        "pos_values": [],
        "neg_str": [],
        "neg_values": [],
    }


class _ExampleReader:
    """Reads the tokens of examples, and the weights of their atom on each token."""

    def __init__(self, coded_text: CodedText, names: _Names) -> None:
        self._coded_text = coded_text
        self._names = names
        self._texts: dict[int, str] = {}  # of ids
        fingerprints = json.dumps(coded_text.codes.meta["fingerprints"], sort_keys=True)
        self._origin = f"{fingerprints}-{names.model}-{names.source}"

    def rows(self, examples: AtomExamples, atom: int) -> Iterator[JsonObject]:
        """The rows of the examples of an atom, the strongest first."""
        strongest = _of_atom(examples.strongest, atom)
        bounds = {"binMin": OF_STRONGEST, "binMax": round(float(examples.largest[atom]), DIGITS)}
        for row in range(len(strongest)):
            yield {**self._row(strongest[row : row + 1], atom), **bounds, "binContains": OF_STRONGEST}
        drawn = _of_atom(examples.drawn, atom)
        intervals = examples.intervals_of(drawn).tolist()
        shares = examples.bars[atom].reshape(INTERVALS, -1).sum(axis=1) / max(int(examples.occurrences[atom]), 1)
        edges = _rounded(np.linspace(0, float(examples.largest[atom]), INTERVALS + 1))
        for row, interval in enumerate(intervals):
            bounds = {"binMin": edges[interval], "binMax": edges[interval + 1]}
            share = round(float(shares[interval]), DIGITS)
            yield {**self._row(drawn[row : row + 1], atom), **bounds, "binContains": share}

    def _row(self, example: Examples, atom: int) -> JsonObject:
        """The row of one example, without its interval."""
        start = int(example.starts[0])
        positions = np.arange(start, int(example.stops[0]))
        atoms, weights = self._coded_text.codes.lookup(positions)
        values = np.where(atoms == atom, weights, 0).astype(np.float64).sum(axis=1)
        place = int(values.argmax())
        digest = hashlib.sha256(f"{self._origin}-{atom}-{start}".encode()).hexdigest()
        return {
            "id": f"c{digest[:24]}",
            **self._names.row(atom),
            "tokens": [self._text_of(number) for number in self._ids(positions).tolist()],
            "values": _rounded(values),
            "maxValue": round(float(values[place]), DIGITS),
            "maxValueTokenIndex": place,
            "minValue": round(float(values.min()), DIGITS),
            "qualifyingTokenIndex": place,
        }

    def _ids(self, positions: np.ndarray) -> np.ndarray:
        """The ids at consecutive positions of one sequence."""
        text = self._coded_text.text
        sequence = int(np.searchsorted(text.starts, positions[0], side="right")) - 1
        return text[sequence][positions - text.starts[sequence]]

    def _text_of(self, number: int) -> str:
        if number not in self._texts:
            # the database takes no NUL
            self._texts[number] = self._coded_text.tokenizer.text_of_id(number).replace("\0", "\ufffd")
        return self._texts[number]


def _of_atom(examples: Examples, atom: int) -> Examples:
    """The examples of an atom; they are sorted by atom."""
    first, last = np.searchsorted(examples.atoms, [atom, atom + 1]).tolist()
    return examples[slice(first, last)]


def _rounded(values: np.ndarray) -> list[float]:
    rounded: list[float] = np.round(values, DIGITS).tolist()
    return rounded


def _line(row: JsonObject) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


@contextmanager
def _gzip_file(path: Path) -> Iterator[IO[bytes]]:
    """A compressed file whose bytes depend only on its content."""
    with open(path, "wb") as raw, gzip.GzipFile(filename="", mode="wb", compresslevel=5, fileobj=raw, mtime=0) as file:
        yield file  # type: ignore[misc]  # a GzipFile has all that is used of IO
