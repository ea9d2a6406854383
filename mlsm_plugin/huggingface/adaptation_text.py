"""The text of an adaptation: from files or a dataset to sequences, and which of them are held out."""

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from mlsm_plugin.core.files.atomic_files import atomic_open
from mlsm_plugin.core.files.hf_files import hf_folder
from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.files.npy_files import map_npy
from mlsm_plugin.core.files.sentence_modules import MEAN, pooling_of
from mlsm_plugin.core.files.step_record import Step
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceSource
from mlsm_plugin.core.losses.sentence_vectors import leading_directions, share_kept
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.core.text.shared_text import warn_of_shared_files
from mlsm_plugin.huggingface.adaptation_folder import AUXILIARY, DIRECTIONS, DOCUMENTS, PLACES, TOKENIZER
from mlsm_plugin.huggingface.adaptation_settings import VECTORS, WITH_AUXILIARY
from mlsm_plugin.huggingface.adaptation_setup import AdaptationSetup
from mlsm_plugin.huggingface.aligned_sequences import AlignedSequences, write_aligned
from mlsm_plugin.huggingface.dataset_text import files_of_dataset, rows_of_dataset, rows_of_files, write_column
from mlsm_plugin.huggingface.sentence_vectors import write_vectors
from mlsm_plugin.huggingface.student_model import learn_tokenizer
from mlsm_plugin.huggingface.text_sequences import write_text_sequences
from mlsm_plugin.huggingface.token_sequences import TokenSequences

HELD_OUT = 0.02  # share of the sequences, at the end of the text, if no text to evaluate on was passed
MOST_HELD_OUT = 2000
HOLDS_OUT = "holds_out"  # key of the settings of the step ``text``


class AdaptationText:
    """The files, tokenizer and sequences of an adaptation, each opened once, and the steps that make them.

    Attributes:
        tokenizer_folder: the folder of the tokenizer of the model that is trained.
        is_plain: whether the files that the user passed are plain text.
        is_aligned: whether the auxiliary model reads the text in tokens of another vocabulary.
        names: the names of the folders of sequences.
    """

    def __init__(self, setup: AdaptationSetup) -> None:
        self.setup = setup
        settings = setup.settings
        self.settings = settings
        self.output = setup.output
        has_new_tokenizer = settings.vocab_size is not None
        self.tokenizer_folder = self.output / TOKENIZER if has_new_tokenizer else setup.source
        self.is_plain = settings.dataset is None and settings.column is None
        self.is_aligned = has_new_tokenizer and settings.objective in WITH_AUXILIARY
        self.names = ["tokens", "valid"] if settings.valid_texts else ["tokens"]

    @property
    def files(self) -> Sequence[str]:
        """The files of plain text to train on."""
        return self.settings.texts if self.is_plain else [str(self.output / DOCUMENTS)]

    @property
    def evaluated_files(self) -> list[Path]:
        """The files of --valid, on which nothing but figures depends; none in a folder of an earlier version."""
        recorded = self.setup.record.settings_of("text")
        is_earlier = HOLDS_OUT not in recorded and "valid" in self.setup.record.folders_of("text")
        return [] if is_earlier else [Path(text) for text in self.settings.valid_texts]

    @property
    def _inputs(self) -> list[Path]:
        """The files whose contents decide what the model is trained on."""
        texts = [Path(text) for text in self.files]
        if not self.evaluated_files:  # an earlier version made all anew for another --valid; its folders still do
            texts += [Path(text) for text in self.settings.valid_texts]
        return texts

    @cached_property
    def tokenizer(self) -> HuggingFaceTokenizer:
        """The tokenizer of the model that is trained."""
        if self.settings.vocab_size is None:
            return self.setup.source_tokenizer
        return HuggingFaceTokenizer(self.tokenizer_folder)

    @cached_property
    def sequences(self) -> tuple[TokenSequences, TokenSequences]:
        """The sequences to train on and to evaluate on; ValueError if there are too few."""
        fewest = 2 if self.settings.objective == "npm" else 1  # npm finds spans in other sequences
        text = self._tokenized(self.files, "tokens")
        if self.settings.valid_texts:
            train = text
            valid = self._tokenized(self.settings.valid_texts, "valid")
        else:
            held_out = min(max(fewest, math.ceil(HELD_OUT * len(text))), MOST_HELD_OUT)
            if len(text) < 2 * held_out + 1:
                raise ValueError(
                    f"the text has only {len(text)} sequences of at most {self.setup.length} ids, too few to hold some "
                    "out; pass more text, or text to evaluate on with --valid"
                )
            train = text.part(0, len(text) - held_out)
            valid = text.part(len(text) - held_out, len(text))
        short = [flag for flag, part in (("--text", train), ("--valid", valid)) if len(part) < fewest]
        if short:
            raise ValueError(
                f"the text of {short[0]} is only 1 sequence, and npm finds spans in other sequences; pass more text, "
                "or a smaller --max-length"
            )
        return train, valid

    def _tokenized(self, files: Sequence[str], name: str) -> TokenSequences:
        """The sequences of files, written to the folder ``name`` unless they are there."""
        sequences, _ = write_text_sequences(
            files,
            self.tokenizer,
            self.output / name,
            max_length=self.setup.length,
            max_unk_rate=self.settings.max_unk_rate,
            apart=self.settings.objective == VECTORS,
        )
        return sequences

    @cached_property
    def aligned(self) -> list[AlignedSequences | None]:
        """Both parts of the text as the auxiliary model reads them, if its vocabulary differs; else None for each."""
        if not self.is_aligned:
            return [None, None]
        whole_texts = [
            AlignedSequences(
                TokenSequences(self.output / f"{name}.{AUXILIARY}"), TokenSequences(self.output / f"{name}.{PLACES}")
            )
            for name in self.names
        ]
        train, valid = self.sequences
        last = len(train) + len(valid)
        second = whole_texts[1] if self.settings.valid_texts else whole_texts[0].part(len(train), last)
        return [whole_texts[0].part(0, len(train)), second]

    @property
    def coded_sequences(self) -> list[TokenSequences]:
        """Both parts of the text as the auxiliary model reads them."""
        pairs = zip(self.sequences, self.aligned, strict=True)
        return [sequences if aligned is None else aligned.sequences for sequences, aligned in pairs]

    def documents_step(self) -> Step:
        """The step that makes plain text of a dataset, or of a column of the files."""
        settings = self.settings
        source = {"dataset": settings.dataset, "split": settings.split, "column": settings.column}
        files = [Path(text) for text in settings.texts]
        if settings.dataset is not None:
            files = files_of_dataset(settings.dataset)
        return Step("documents", self._write_documents, source, files, [self.output / DOCUMENTS])

    def _write_documents(self) -> None:
        rows = rows_of_files(self.settings.texts)
        if self.settings.dataset is not None:
            rows = rows_of_dataset(self.settings.dataset, self.settings.split)
        number = write_column(rows, self.settings.column or "text", self.output / DOCUMENTS)
        print(f"{number:,} documents")

    def tokenizer_step(self) -> Step:
        """The step that learns a tokenizer from the text to train on."""
        size = {"vocab_size": self.settings.vocab_size, **self._reading()}
        texts = [Path(text) for text in self.files]
        return Step("tokenizer", self._learn_tokenizer, size, texts, [self.output / TOKENIZER])

    def _learn_tokenizer(self) -> None:
        assert self.settings.vocab_size is not None
        source = self.setup.source
        learn_tokenizer(self.files, source, self.output / TOKENIZER, vocab_size=self.settings.vocab_size)

    def text_step(self) -> Step:
        """The step that tokenizes the text."""
        evaluated = self.evaluated_files
        reading = self._reading()
        if evaluated:
            reading[HOLDS_OUT] = False  # all of the text is trained on
        tokens = [self.output / name for name in self.names]
        return Step(
            "text", self._write_text, reading, self._inputs, tokens, evaluated=evaluated, of_evaluation=tokens[1:]
        )

    def _write_text(self) -> None:
        """Tokenize the text, and print its size."""
        warn_of_shared_files(self.files, self.settings.valid_texts)
        train, valid = self.sequences
        updates = self.setup.updates(len(train))
        print(f"{len(train):,} sequences to train on in {updates:,} updates, {len(valid):,} to evaluate on")

    def _reading(self) -> JsonObject:
        """The settings with which the text is read."""
        return {
            "files": len(self.files),
            "max_length": self.setup.length,
            "apart": self.settings.objective == VECTORS,
            "vocabulary": self.setup.source_tokenizer.vocabulary_fingerprint,
            "segmentation": self.setup.source_tokenizer.segmentation_fingerprint,
        }

    def alignment_step(self) -> Step:
        """The step that writes the text as the auxiliary model reads it, and where each token is in it."""
        folders = [self.output / f"{name}.{kind}" for name in self.names for kind in (AUXILIARY, PLACES)]
        return Step(
            "alignment",
            self._align,
            {},
            self._inputs,
            folders,
            evaluated=self.evaluated_files,
            of_evaluation=folders[2:],
        )

    def _align(self) -> None:
        sources = [self.files, self.settings.valid_texts]
        for name, files in zip(self.names, sources, strict=False):
            write_aligned(
                files,
                TokenSequences(self.output / name),
                self.tokenizer,
                self.setup.source_tokenizer,
                self.output / f"{name}.{AUXILIARY}",
                self.output / f"{name}.{PLACES}",
                max_length=HuggingFaceSource.usual_tokens_of(self.settings.model),
                max_unk_rate=self.settings.max_unk_rate,
            )

    def vectors_step(self) -> Step:
        """The step that writes the teacher's vectors of the text."""
        vectors = [self.output / f"{name}.vectors.npy" for name in self.names]
        name = str(self.settings.teacher_model)
        teacher = {"teacher": HuggingFaceSource.fingerprint_of(name)}
        pooling = pooling_of(hf_folder(name))
        if pooling != MEAN:  # records of earlier versions lack it
            teacher["pooling"] = pooling
        return Step(
            "vectors",
            self._write_vectors,
            teacher,
            [],
            vectors,
            evaluated=self.evaluated_files,
            of_evaluation=vectors[1:],
        )

    def _write_vectors(self) -> None:
        for files, name in ((self.files, "tokens"), (self.settings.valid_texts, "valid")):
            if files:
                write_vectors(
                    files,
                    self._tokenized(files, name),
                    self.tokenizer_folder,
                    str(self.settings.teacher_model),
                    self.output / f"{name}.vectors.npy",
                    max_unk_rate=self.settings.max_unk_rate,
                    device=self.setup.device,
                    fp16=self.setup.training.in_bf16,
                )

    def directions_step(self) -> Step:
        """The step that finds the directions of the teacher's vectors that a narrower model learns."""
        width: JsonObject = {"width": self.setup.config.hidden_size}
        return Step("directions", self._write_directions, width, [], [self.output / DIRECTIONS])

    def _write_directions(self) -> None:
        train, held_out = self.vectors
        directions = leading_directions(train, self.setup.config.hidden_size)
        with atomic_open(self.output / DIRECTIONS) as file:
            np.save(file, directions)
        wide, narrow = directions.shape
        print(
            f"the model is narrower than the teacher: it learns {narrow} of {wide} directions, which have "
            f"{share_kept(held_out, directions):.1%} of the squared lengths of the held-out vectors"
        )

    @property
    def vectors(self) -> list[np.ndarray]:
        """The teacher's vectors of both parts; held-out sequences come from the end of the text."""
        train, _ = self.sequences
        first = map_npy(self.output / "tokens.vectors.npy", ndim=2)
        second = first[len(train) :]
        if self.settings.valid_texts:
            second = map_npy(self.output / "valid.vectors.npy", ndim=2)
        return [first[: len(train)], second]
