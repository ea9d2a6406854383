"""Train a SentencePiece tokenizer on a stream of text, and write the fairseq dictionary next to it."""

import io
import logging
import random
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path

import sentencepiece as spm

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_directory
from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.files.model_files import DICTIONARY_NAME, MODEL_NAME
from mlsm_plugin.core.files.progress import elapsed_time
from mlsm_plugin.core.files.settings import check, identity, option
from mlsm_plugin.core.masking.word_boundaries import SENTENCEPIECE_BEGIN
from mlsm_plugin.core.text.text_files import MAX_LINE_BYTES, check_text, check_text_files, progress_bar, read_lines
from mlsm_plugin.core.text.unknown_tokens import name_characters

SPECIAL_PIECES = frozenset({"<unk>", "<s>", "</s>", "<pad>"})  # fairseq's Dictionary adds these itself


def dictionary_pieces(processor: spm.SentencePieceProcessor) -> list[str]:
    """The pieces of ``dict.txt``: the SentencePiece vocabulary in its order, without the special pieces.

    ValueError if fairseq could not read a piece back, or would treat it as a special symbol.
    """
    pieces = [processor.id_to_piece(i) for i in range(len(processor))]
    pieces = [piece for piece in pieces if piece not in SPECIAL_PIECES]
    for piece in pieces:
        if re.search(r"\s", piece):
            raise ValueError(
                f"the piece {piece!r} contains whitespace, which dict.txt cannot hold; train with `mlsm tokenizer`"
            )
        if re.fullmatch(r"<[^<>]+>", piece):
            raise ValueError(f"the piece {piece!r} looks like a special symbol; train with `mlsm tokenizer`")
    return pieces


def dictionary_text(processor: spm.SentencePieceProcessor, counts: Mapping[str, int]) -> str:
    """The content of ``dict.txt``: a line ``piece count`` for every piece; counts are at least 1."""
    return "".join(f"{piece} {max(1, counts.get(piece, 0))}\n" for piece in dictionary_pieces(processor))


MODEL_TYPES = ("unigram", "bpe")
FEWEST_SENTENCES = 101  # smallest sample that SentencePiece supports
MOST_PIECES = 1 << 24
COUNTED_SENTENCES = 100_000  # number of sampled sentences that the counts of dict.txt come from
LEAST_COVERAGE = 0.98  # of the characters, that SentencePiece allows
USUAL_COVERAGE = 0.9995  # where a script has too many characters for a piece each
FORMER_COVERAGE = 0.9995  # the default of versions that gave rare letters no piece
PIECES_PER_CHARACTER = 4  # characters may take a quarter of the pieces
LINES_AT_ONCE = 1000  # whose characters are counted
SEED = 1
logger = logging.getLogger(__name__)
THREADS = 8  # the same for any number of cores: the sums of EM, and thus the model, depend on it

# Characters that never get a piece. SentencePiece skips a training sentence that contains NUL or U+2585 (its
# placeholder). Its normalization keeps U+0085, at which fairseq would split a piece.
NOT_IN_PIECES = re.compile("[\\s\0\u2585]+")
# all characters that normalize to "<"
LESS_THAN = re.compile("[<\ufe64\uff1c]")
# the symbols that fairseq, SentencePiece and the exported tokenizers all keep as one piece
USER_SYMBOLS = (
    "a user symbol is text without spaces that normalization leaves as it is (with --lowercase, in lower case), other "
    "than <...> and <, such as [url] or @user"
)


@dataclass(frozen=True)
class TokenizerSettings:
    """How a tokenizer is trained; ValueError if a value is out of range, or a user symbol cannot be a piece."""

    vocab_size: int = option(least=1, most=MOST_PIECES, help="number of SentencePiece pieces")
    model_type: str = option("unigram", choices=MODEL_TYPES, help="how the pieces are learned")
    lowercase: bool = option(False, help="lower-case all text")
    character_coverage: float | None = option(
        None,
        least=LEAST_COVERAGE,
        most=1,
        help="share of the text's characters that get a piece; the rest becomes <unk> and is listed (default: all "
        "characters, if a quarter of the pieces is enough for them; else the most frequent ones, 0.9995 of the text "
        "or more, and all of ASCII)",
    )
    max_sentences: int = option(
        2_000_000,
        least=FEWEST_SENTENCES,
        help="learn from a uniform sample of this many sentences, which bounds the memory",
    )
    user_symbols: list[str] = option(
        [],
        metavar="SYMBOL",
        help="pieces that are never split, such as [url] or @user; text without spaces, other than <...>",
    )
    keep_characters: bool | None = None  # change no characters, and therefore no words, of the text

    def __post_init__(self) -> None:
        check(self)
        check_user_symbols(self.user_symbols, self.normalization)

    @property
    def normalization(self) -> str:
        """SentencePiece's name of the normalization rules."""
        if self.keep_characters:
            return "identity"
        return "nmt_nfkc_cf" if self.lowercase else "nmt_nfkc"


def resumed_settings(settings: TokenizerSettings, recorded: JsonObject) -> TokenizerSettings:
    """The settings of a tokenizer in a folder whose record has ``recorded``, which an earlier version may have written.

    Its default was a coverage of 0.9995; the folder keeps it if nothing else differs.
    """
    former = replace(settings, character_coverage=FORMER_COVERAGE)
    return former if settings.character_coverage is None and identity(former) == recorded else settings


@dataclass(frozen=True)
class TokenizerFigures:
    """The result of ``train_tokenizer``."""

    output: Path  # the folder with the model and ``dict.txt``
    model_type: str
    pieces: int  # of SentencePiece, with special pieces
    dictionary_symbols: int  # length of fairseq's ``Dictionary`` after loading (a task adds ``<mask>``)
    sentences: int  # lines with text that were read
    sampled_sentences: int  # those that the pieces were learned from
    unknown_characters: dict[str, int]  # of the text, that got no piece, and how often they occur


class TrainingText:
    """Yields cleaned sentences to SentencePiece, and keeps a reservoir sample of them, and any error.

    SentencePiece replaces an exception in its iterator by a ``RuntimeError``; the original is kept here. ``report`` is
    as in :func:`.read_lines`; ``when_read`` is called after the last sentence, when SentencePiece begins to learn.
    """

    def __init__(
        self,
        paths: Sequence[PathLike],
        report: Callable[[int], object] | None = None,
        when_read: Callable[[], object] | None = None,
    ) -> None:
        self.sentences = 0
        self.sample: list[str] = []
        self.error: Exception | None = None
        self._paths = paths
        self._report = report
        self._when_read = when_read
        self._random = random.Random(SEED)

    def __iter__(self) -> Iterator[str]:
        try:
            for path in self._paths:
                for line in read_lines(path, self._report):
                    if not (sentence := clean_sentence(line)):
                        continue
                    self.sentences += 1
                    if len(self.sample) < COUNTED_SENTENCES:
                        self.sample.append(sentence)
                    elif (place := self._random.randrange(self.sentences)) < COUNTED_SENTENCES:
                        self.sample[place] = sentence
                    yield sentence
            if self._when_read is not None:
                self._when_read()
        except (ValueError, OSError) as error:
            self.error = error
            raise


def clean_sentence(line: str) -> str:
    """Clean a sentence so that no piece is learned that fairseq would misread; encoding does not need this step.

    Whitespace that normalization keeps becomes a space. A space after every ``<`` prevents pieces like ``<mask>``.
    """
    return LESS_THAN.sub("< ", NOT_IN_PIECES.sub(" ", line)).strip()


def count_characters(
    paths: Sequence[PathLike], normalization: str, report: Callable[[int], object] | None = None
) -> Counter[str]:
    """How often each character occurs in the text, normalized by these rules, without the spaces between words.

    Whitespace that normalization keeps, such as U+0085, is counted. ``report``, and what raises ValueError or OSError,
    are as in :func:`.read_lines`.
    """
    normalizer = spm.SentencePieceNormalizer(rule_name=normalization, add_dummy_prefix=False)
    sentences = (LESS_THAN.sub("< ", line) for path in paths for line in read_lines(path, report))
    counts: Counter[str] = Counter()
    while batch := list(islice(sentences, LINES_AT_ONCE)):
        counts.update("".join(normalizer.normalize(batch)))
    return Counter({c: count for c, count in counts.items() if c not in (SENTENCEPIECE_BEGIN, " ")})


def characters_with_a_piece(counts: Mapping[str, int], vocab_size: int) -> list[str]:
    """The characters that get a piece where no share of them is asked for.

    All of them if they fill at most a quarter of the vocabulary, as the letters, digits and punctuation of an alphabet
    do. Else the most frequent ones: a quarter, or as many as cover 99.95 % of the text if that is more, and those of
    ASCII.
    """
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    covered = list(accumulate(counts[character] for character in ranked))
    covering = bisect_left(covered, USUAL_COVERAGE * sum(counts.values())) + 1
    frequent = max(vocab_size // PIECES_PER_CHARACTER, covering)
    return ranked[:frequent] + [character for character in ranked[frequent:] if "!" <= character <= "~"]


def train_tokenizer(
    inputs: Sequence[PathLike], output: PathLike, settings: TokenizerSettings, *, verbose: bool = False
) -> TokenizerFigures:
    """Train SentencePiece on text files; write ``sentencepiece.bpe.model`` and ``dict.txt``.

    The text is read twice, streamed and sampled: memory depends on ``max_sentences`` only. The same input and settings
    give the same files. The model itself normalizes text with NFKC, and with ``lowercase`` also folds case. The inputs
    are UTF-8, plain or compressed, with one sentence per line; after a failure the folder is unchanged. Warnings list
    the characters of the text that get no piece.

    Raises:
        ValueError: an option or an input is invalid, such as a vocabulary larger than the text allows.
        OSError: a file cannot be read or written.
    """
    if Path(output).exists() and not Path(output).is_dir():
        raise ValueError(f"{output} exists and is not a folder; choose another name")
    total = check_text_files(inputs)
    with ExitStack() as shown:
        bar = shown.enter_context(progress_bar("reading text", 2 * total))

        def show_learning() -> None:
            bar.close()
            shown.enter_context(elapsed_time("learning pieces"))

        all_characters = count_characters(inputs, settings.normalization, bar.update)
        for symbol in settings.user_symbols:  # a piece already
            all_characters.pop(symbol, None)
        characters = Counter({c: count for c, count in all_characters.items() if not NOT_IN_PIECES.match(c)})
        text = TrainingText(inputs, bar.update, show_learning)
        model = _train(text, characters, settings, verbose=verbose)
    processor = spm.SentencePieceProcessor()
    processor.load_from_serialized_proto(model)
    missing = {c: count for c, count in all_characters.items() if processor.piece_to_id(c) == processor.unk_id()}
    unknown = {c: count for c, count in missing.items() if not c.isspace()}
    if unknown:
        share = sum(unknown.values()) / all_characters.total()
        logger.warning(
            f"{len(unknown):,} different characters, {share:.3%} of the text, get no piece and become <unk>: "
            + name_characters(unknown)
        )
    spaces = {c: count for c, count in missing.items() if c.isspace()}
    if spaces:
        logger.warning(
            f"white space that gets no piece is left out, and does not separate words: {name_characters(spaces)}"
        )
    counts = Counter(piece for sentence in text.sample for piece in processor.encode(sentence, out_type=int))
    dictionary = dictionary_text(processor, {processor.id_to_piece(piece): count for piece, count in counts.items()})
    with atomic_directory(output) as folder:
        (folder / MODEL_NAME).write_bytes(model)
        (folder / DICTIONARY_NAME).write_text(dictionary, encoding="utf-8", newline="\n")
    return TokenizerFigures(
        output=Path(output),
        model_type=settings.model_type,
        pieces=len(processor),
        dictionary_symbols=dictionary.count("\n") + 4,
        sentences=text.sentences,
        sampled_sentences=min(text.sentences, settings.max_sentences),
        unknown_characters=unknown,
    )


def check_user_symbols(symbols: Sequence[str], normalization: str) -> None:
    """Raise ValueError unless each symbol stays one piece under SentencePiece's ``normalization`` rules."""
    normalizer = spm.SentencePieceNormalizer(
        rule_name=normalization, add_dummy_prefix=False, escape_whitespaces=False, remove_extra_whitespaces=False
    )
    for number, symbol in enumerate(symbols):
        if symbol in symbols[:number]:
            raise ValueError(f"user_symbols has {symbol!r} twice")
        check_text(symbol, f"user_symbols {symbol!r}")
        odd = NOT_IN_PIECES.search(symbol) or SENTENCEPIECE_BEGIN in symbol or re.fullmatch(r"<?|<[^<>]+>", symbol)
        if odd or normalizer.normalize(symbol) != symbol:
            raise ValueError(f"user_symbols {symbol!r} cannot be a piece: {USER_SYMBOLS}")


def _train(text: TrainingText, counts: Counter[str], settings: TokenizerSettings, *, verbose: bool) -> bytes:
    """The model of SentencePiece for text with these characters.

    SentencePiece's failures become a ``ValueError`` that says what to change.
    """
    model = io.BytesIO()
    required = "<"  # gets its own piece at any coverage: unknown text can never look like "<mask>" either
    coverage = settings.character_coverage
    if coverage is None:
        characters = characters_with_a_piece(counts, settings.vocab_size)
        required += "".join(characters)  # a sample of the text may lack some
        # with a smaller coverage, SentencePiece would leave out a part of what is required, and the mark of words
        coverage = max(LEAST_COVERAGE, sum(counts[character] for character in characters) / max(1, counts.total()))
    spm.set_random_generator_seed(SEED)
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(text),
            model_writer=model,
            shuffle_input_sentence=True,
            max_sentence_length=2 * MAX_LINE_BYTES,  # SentencePiece would skip sentences above 4 KiB
            num_threads=THREADS,
            required_chars=required,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            vocab_size=settings.vocab_size,
            model_type=settings.model_type,
            normalization_rule_name=settings.normalization,
            user_defined_symbols=settings.user_symbols,
            character_coverage=coverage,
            input_sentence_size=settings.max_sentences,
            minloglevel=0 if verbose else 2,
        )
    except RuntimeError as error:
        if text.error is not None:
            raise text.error from None
        raise ValueError(_explain(str(error), settings.vocab_size)) from None
    return model.getvalue()


def _explain(message: str, vocab_size: int) -> str:
    if match := re.search(r"too high \(\d+\).*<= (\d+)", message, re.DOTALL):
        return (
            f"the text is too short for a vocabulary of {vocab_size} pieces; the largest possible size is {match[1]}: "
            "pass it, or a smaller one, or more text"
        )
    if match := re.search(r"required_chars\. (\d+) vs (\d+)", message):
        return (
            f"a vocabulary of {vocab_size} pieces cannot hold the characters of the text; the smallest possible size "
            f"is {match[2]}; use a larger one, or a lower --character-coverage of `mlsm tokenizer`"
        )
    if "!sentences_.empty()" in message or "all_chars_count" in message:
        return "the input has no text that SentencePiece can learn from; check the input files"
    return f"SentencePiece failed: {message}"
