"""Measurement of a model on held-out text, before and after a training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.files.settings import identity
from mlsm_plugin.core.machine.devices import Device
from mlsm_plugin.evaluation.encoder_quality import (
    EvaluationData,
    Measure,
    choose_masked_words,
    documents_of,
    evaluate_encoder,
    make_retrieval,
    read_evaluation_data,
)
from mlsm_plugin.evaluation.quality_settings import QualitySettings
from mlsm_plugin.evaluation.quality_tables import RETRIEVAL, WORDS, is_lower, record_of
from mlsm_plugin.evaluation.sentence_encoders import open_sentence_encoder

# takes a minute on two cores for two models of MiniLM's size
SMALL = QualitySettings(queries=200, passages=400)
GOT_WORSE = (
    "The loss fell, but the sentence vectors find fewer passages than before: the model got worse at search and "
    "similarity."
)


@dataclass(frozen=True)
class HeldOutQuality:
    """Measures each model by retrieval, masked words, and linear probes on ``labelled`` files.

    Attributes:
        labelled: a training and a test file for each probe.
        settings: which part of the text is used, and how much.
    """

    labelled: Sequence[tuple[PathLike, PathLike]] = ()
    settings: QualitySettings = field(default_factory=lambda: SMALL)

    def identity(self) -> JsonObject:
        """The values on which the figures depend, besides the files."""
        return identity(self.settings)

    def files(self) -> list[Path]:
        """The labelled files."""
        return [Path(path) for paths in self.labelled for path in paths]

    def check(self) -> None:
        """Raise ValueError if the labelled files cannot be used."""
        if self.labelled:
            read_evaluation_data([], self.labelled, [], self.settings)

    def measure(self, models: Mapping[str, Path], text: Path, *, loss_fell: bool, device: Device = None) -> JsonObject:
        """Measure models on a text, and compare each with the first.

        Args:
            models: their folders by row name.
            text: held-out text with one sentence per line and blank lines between documents.
            loss_fell: whether the last model has a lower loss than the first.
            device: where the models run; None: a GPU if there is one.

        Returns:
            ``models`` with the figures (see :func:`record_of`), the numbers of ``sentences`` and ``passages`` of the
            retrieval and of ``lines`` with masked words, and ``notes``: lines about figures that were left out or got
            worse.
        """
        notes: list[str] = []
        data = self._data(text, notes)
        measures: dict[str, dict[str, Measure]] = {}
        parameters: dict[str, int] = {}
        if data.lines or data.labelled:
            try:
                for name, folder in models.items():
                    encoder = open_sentence_encoder(folder, device)
                    parameters[name] = encoder.parameters
                    measures[name] = evaluate_encoder(encoder, data)
            except (ValueError, RuntimeError) as error:  # do not fail: the model is already trained and saved
                notes.append(f"the models are not compared: {error}")
                measures = {}
        if len(measures) > 1 and _got_worse(measures, loss_fell):
            notes.append(GOT_WORSE)
        return {
            "models": record_of(measures, parameters) if measures else {},
            "sentences": len(data.retrieval.queries) if data.retrieval else 0,
            "passages": len(data.retrieval.passages) if data.retrieval else 0,
            "lines": len(data.lines),
            "notes": notes,
        }

    def _data(self, text: Path, notes: list[str]) -> EvaluationData:
        """The data to measure on; adds a line to ``notes`` for each measure that the text is too short for."""
        probes = read_evaluation_data([], self.labelled, [], self.settings).labelled if self.labelled else {}
        try:
            documents = documents_of([text])
        except ValueError:  # the held-out sequences are a part of one line
            notes.append("retrieval and masked words are left out: the held-out text has no whole line")
            return EvaluationData(labelled=probes)
        retrieval = None
        try:
            retrieval = make_retrieval(documents, self.settings)
        except ValueError as error:
            notes.append(f"retrieval is left out: {error}")
        lines, words = choose_masked_words(documents, self.settings)
        return EvaluationData(retrieval, lines, words, probes)


def _got_worse(measures: Mapping[str, Mapping[str, Measure]], loss_fell: bool) -> bool:
    """Whether the last model has a lower loss than the first, but finds fewer passages."""
    first, *_, last = measures.values()
    return is_lower(last, first, RETRIEVAL) and (loss_fell or is_lower(last, first, WORDS))
