"""The tokenizer's files: every piece survives fairseq's Dictionary, and no text becomes a special symbol."""

from __future__ import annotations

import gzip
import random
import re
from pathlib import Path

import numpy as np
import pytest
import sentencepiece as spm
from fairseq.data import Dictionary
from fairseq.tokenizer import tokenize_line
from hypothesis import given
from hypothesis import strategies as st

from mlsm_plugin.cli.main import main
from mlsm_plugin.core.files import progress
from mlsm_plugin.core.text.unknown_tokens import UnknownTokens
from mlsm_plugin.fairseq_plugin.text import sentencepiece_training
from mlsm_plugin.fairseq_plugin.text.sentencepiece_training import TokenizerSettings, train_tokenizer
from mlsm_plugin.fairseq_plugin.text.text_tokenizer import SentencePieceTokenizer

ODD_CHARACTERS = "\u00a0\u2028\u2029\x85\t\x0b\x0c\x1c\x1d\x1e\x1f\x07\x7f\x9f\u3000\u200b\u202f\u2581\u2585\ufeff"
SPECIAL_WORDS = ["<mask>", "<pad>", "<s>", "</s>", "<unk>", "＜mask＞", "﹤mask﹥", "<sentinel_0>", "<MASK>"]


def load(folder) -> tuple[spm.SentencePieceProcessor, Dictionary]:
    processor = spm.SentencePieceProcessor(model_file=str(folder / "sentencepiece.bpe.model"))
    return processor, Dictionary.load(str(folder / "dict.txt"))


def assert_every_piece_survives(processor, dictionary):
    pieces = [processor.id_to_piece(i) for i in range(len(processor))]
    ordinary = [piece for piece in pieces if piece not in ("<unk>", "<s>", "</s>")]
    assert dictionary.symbols[dictionary.nspecial :] == ordinary
    for index, piece in enumerate(ordinary):
        assert tokenize_line(piece) == [piece]
        assert dictionary.encode_line(piece, add_if_not_exist=False).tolist() == [index + 4, dictionary.eos()]
        assert not re.fullmatch("<[^<>]+>", piece)


def write_odd_corpus(path):
    """Odd characters and special words in every position, often enough to be learned."""
    generator = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "x", *SPECIAL_WORDS, *SPECIAL_WORDS]
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for _ in range(3000):
            line = "".join(generator.choice(words) + generator.choice(ODD_CHARACTERS + "   ") for _ in range(8))
            file.write(line + "\n")
        for word in SPECIAL_WORDS:
            file.write(f"{word}\n" * 200)


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_odd_whitespace_and_special_words(tmp_path, model_type, lowercase):
    path = tmp_path / "odd.txt"
    write_odd_corpus(path)
    train_tokenizer(
        [path],
        tmp_path / "tok",
        TokenizerSettings(
            50 if model_type == "unigram" else 90, model_type=model_type, lowercase=lowercase, character_coverage=1.0
        ),
    )
    processor, dictionary = load(tmp_path / "tok")
    assert_every_piece_survives(processor, dictionary)
    mask = dictionary.add_symbol("<mask>")
    for line in path.read_text(encoding="utf-8").split("\n"):
        ids = dictionary.encode_line(" ".join(processor.encode(line, out_type=str)), add_if_not_exist=False)
        assert not {mask, dictionary.bos(), dictionary.pad(), dictionary.eos()} & set(ids[:-1].tolist())


def test_clean_sentence():
    cleaned = sentencepiece_training.clean_sentence("a<mask>\x85\x00b ＜s> <")
    assert cleaned == "a< mask> b < s> <"


def test_an_unknown_stretch_is_never_a_special_symbol(tmp_path):
    """With no Latin letter in the vocabulary SentencePiece would return ``<mask>`` as one unknown piece."""
    path = tmp_path / "chinese.txt"
    path.write_text("他是人口的天\n的天他是\n" * 50, encoding="utf-8")
    train_tokenizer([path], tmp_path / "tok", TokenizerSettings(14))
    processor, _ = load(tmp_path / "tok")
    for word in ("<mask>", "</s>", "<pad>", "<s>"):
        assert word not in processor.encode(f"人{word}他 {word}", out_type=str)


def test_english_dictionary_has_its_order_size_and_counts(loaded):
    assert_every_piece_survives(loaded.processor, loaded.dictionary)
    assert len(loaded.processor) == 1000
    assert len(loaded.dictionary) == 1001
    counts = loaded.dictionary.count[4:]
    assert min(counts) >= 1
    assert loaded.dictionary.get_count(loaded.dictionary.index("▁the")) > 1000


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_same_input_gives_the_same_files_also_from_gzip_and_sampled(corpus, tmp_path, model_type):
    packed = tmp_path / "a.txt.gz"
    packed.write_bytes(gzip.compress(corpus.train[0].read_bytes()))
    for name, source in (("one", corpus.train[0]), ("two", packed)):
        figures = train_tokenizer(
            [source], tmp_path / name, TokenizerSettings(400, model_type=model_type, max_sentences=2000)
        )
        assert figures.sampled_sentences == 2000 < figures.sentences
    for name in ("sentencepiece.bpe.model", "dict.txt"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


SYMBOLS = ["[url]", "@user", "inging", "<=", "a,b", 'q"q', "<b>=", "x"]


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def with_symbols(corpus, tmp_path_factory, request) -> Path:
    """A tokenizer with user symbols, of text that has them and their parts."""
    folder = tmp_path_factory.mktemp("symbols")
    lines = corpus.train[0].read_text(encoding="utf-8").splitlines()
    text = [f"{line} {SYMBOLS[i % len(SYMBOLS)]} url user" for i, line in enumerate(lines)]
    (folder / "text").write_text("\n".join(text), encoding="utf-8")
    words = ["tokenizer", "--input", str(folder / "text"), "--vocab-size", "600", "--model-type", request.param]
    assert main([*words, "--output", str(folder / "tok"), "--user-symbols", *SYMBOLS]) == 0
    return folder / "tok"


def test_user_symbols_are_pieces_that_fairseq_reads_back(with_symbols):
    processor, dictionary = load(with_symbols)
    assert len(processor) == 600
    assert_every_piece_survives(processor, dictionary)
    assert set(SYMBOLS) <= set(dictionary.symbols)


@given(parts=st.lists(st.sampled_from([*SYMBOLS, *"abiglnrsu<=@,[]> ", "ing", "the ", "url", "user"]), max_size=12))
def test_a_user_symbol_is_never_cut(with_symbols, parts):
    text = "".join(parts)
    found = SentencePieceTokenizer(with_symbols).processor.encode(text, out_type=str)
    whole = re.findall("|".join(map(re.escape, sorted(SYMBOLS, key=len, reverse=True))), text)
    assert [piece for piece in found if piece in SYMBOLS] == whole


@pytest.mark.parametrize(
    ("symbols", "named"),
    [
        (["[a]", "<url>"], "'<url>' cannot be a piece"),
        (["<mask>"], "'<mask>' cannot be a piece"),
        (["<"], "'<' cannot be a piece"),
        ([""], "'' cannot be a piece"),
        (["two words"], "'two words' cannot be a piece"),
        (["\u2581the"], "'\u2581the' cannot be a piece"),
        (["\uff38"], "'\uff38' cannot be a piece"),
        (["[url]", "[url]"], "has '[url]' twice"),
        (["--lowercase", "[URL]"], "'[URL]' cannot be a piece"),
    ],
)
def test_what_cannot_be_a_user_symbol_is_named(corpus, tmp_path, capsys, symbols, named):
    flags = ["--lowercase"] if "--lowercase" in symbols else []
    words = ["tokenizer", "--input", str(corpus.valid[0]), "--vocab-size", "300", "--output", str(tmp_path / "tok")]
    assert main([*words, *flags, "--user-symbols", *symbols[len(flags) :]]) == 1
    printed = capsys.readouterr().err
    assert f"--user-symbols {named}" in printed
    assert ("a user symbol is text without spaces" in printed) == ("twice" not in named)
    assert not (tmp_path / "tok").exists()


IDEOGRAPHS = "".join(chr(0x4E00 + number) for number in range(600))
RARE = {
    "english": ("A model reads the text and learns what its words mean, line by line. ", "QZXYJ?!$&/%*+;5679\u00e9"),
    "german": ("Die Wörter über der Straße sind für größere Modelle schön lang. ", "QXYÖÜẞß?!;5679é„“"),
    "code": ("if name in values: return values[name].items() # of all the rest\n", "QZ~^$@&|%\\{}<>!?;'\"+*/5679"),
    "chinese": ("他是人口的天，我们在学习新的语言。模型读一行一行的文字！", "QZxyj?!$&/%5679@~"),
}


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@pytest.mark.parametrize("kind", RARE)
def test_letters_digits_and_punctuation_are_never_unknown(tmp_path, caplog, kind, model_type):
    """Each rare one stands once in 100,000 characters; a coverage of 0.9995 makes them unknown."""
    sentence, rare = RARE[kind]
    generator = random.Random(0)
    words = ["".join(generator.choices(sentence.replace(" ", ""), k=4)) for _ in range(500)]
    lines = [" ".join(generator.choices(words, k=10)) for _ in range(2000)]
    path = tmp_path / "text.txt"
    path.write_text("\n".join([*lines, *rare]), encoding="utf-8")
    for coverage in (None, 0.9995):
        settings = TokenizerSettings(300, model_type=model_type, character_coverage=coverage)
        figures = train_tokenizer([path], tmp_path / "tok", settings)
        processor, _ = load(tmp_path / "tok")
        unknown = {character for character in rare if 0 in processor.encode(character)}
        assert set(figures.unknown_characters) == unknown
        assert not unknown if coverage is None else len(unknown) > 5
    named = "different characters, 0.0\\d\\d% of the text, get no piece and become <unk>: '.+' U.00.. \\(1 times\\), "
    (warning,) = caplog.messages
    assert re.match(rf"{len(unknown)} {named}", warning)
    assert warning.endswith(f", and {len(unknown) - 10} more") == (len(unknown) > 10)


def test_characters_that_never_get_a_piece_are_listed(tmp_path, caplog):
    """U+2585 is a placeholder of SentencePiece; at U+0085, an ellipsis in the wrong encoding, fairseq splits."""
    path = tmp_path / "text.txt"
    path.write_text("a bar \u2585\u2585 and the next\x85line\tof a text\n" * 50, encoding="utf-8", newline="\n")
    figures = train_tokenizer([path], tmp_path / "tok", TokenizerSettings(20))
    assert figures.unknown_characters == {"\u2585": 100}
    unknown, spaces = caplog.messages
    named = r"\d\.\d+% of the text, get no piece and become <unk>: '\u2585' U.2585 \(100 times\)"
    assert re.fullmatch(f"1 different characters, {named}", unknown)
    assert spaces.startswith("white space that gets no piece is left out, and does not separate words: ")
    assert spaces.endswith("'\\x85' U+0085 (50 times)")
    tokenizer = SentencePieceTokenizer(tmp_path / "tok")
    counted = UnknownTokens()
    ids = tokenizer.pieces_of("next\x85line\tof \u2585", counted)
    assert ids.count(tokenizer.processor.unk_id()) == 1
    assert tokenizer.processor.decode([number for number in ids if number]).strip() == "nextline of"


def test_a_script_of_many_characters_keeps_the_frequent_ones_and_all_of_ascii(tmp_path, caplog):
    """600 ideographs in 400 pieces: a quarter of the pieces, and 99.95 % of the text, are for the frequent ones."""
    frequent, rare = IDEOGRAPHS[:40], IDEOGRAPHS[40:]
    path = tmp_path / "text.txt"
    lines = [frequent[start:] + frequent[:start] for start in range(40)] * 200
    path.write_text("\n".join([*lines, rare, "Q", "~"]), encoding="utf-8")
    figures = train_tokenizer([path], tmp_path / "tok", TokenizerSettings(460))
    processor, _ = load(tmp_path / "tok")
    assert all(0 not in processor.encode(character) for character in f"{frequent}Q~<")
    assert len(figures.unknown_characters) > 100
    assert set(figures.unknown_characters) < set(rare)
    assert caplog.messages[0].startswith(f"{len(figures.unknown_characters)} different characters, ")


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_all_characters_that_shall_have_a_piece_get_one_and_so_does_the_mark_of_words(tmp_path, model_type):
    """Text without spaces, in which the mark of words is rare, and characters are as unequal as in Chinese."""
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(0x4E00, 0x4F2C, size=rng.integers(1, 4)))) for _ in range(400)]
    path = tmp_path / "text.txt"
    lines = ["".join(words[min(399, z - 1)] for z in rng.zipf(1.3, size=rng.integers(20, 60))) for _ in range(800)]
    path.write_text("\n".join(lines), encoding="utf-8")
    figures = train_tokenizer([path], tmp_path / "tok", TokenizerSettings(1000, model_type=model_type))
    counts = sentencepiece_training.count_characters([path], "nmt_nfkc")
    kept = sentencepiece_training.characters_with_a_piece(counts, 1000)
    assert len(kept) < len(counts)
    processor, _ = load(tmp_path / "tok")
    assert all(0 not in processor.encode(character) for character in kept)
    assert set(figures.unknown_characters) <= set(counts) - set(kept)


@given(
    counts=st.dictionaries(st.characters(min_codepoint=33), st.integers(1, 5000), min_size=1), size=st.integers(1, 400)
)
def test_characters_with_a_piece(counts, size):
    kept = sentencepiece_training.characters_with_a_piece(counts, size)
    assert len(set(kept)) == len(kept)
    assert len(kept) >= min(len(counts), size // 4)
    assert sum(counts[character] for character in kept) >= 0.9995 * sum(counts.values())
    assert {character for character in counts if "!" <= character <= "~"} <= set(kept)


def test_a_folder_of_an_earlier_version_keeps_its_coverage():
    former = {
        "vocab_size": 300,
        "model_type": "unigram",
        "lowercase": False,
        "character_coverage": 0.9995,
        "max_sentences": 2_000_000,
        "user_symbols": [],
        "keep_characters": None,
    }
    resumed = sentencepiece_training.resumed_settings
    assert resumed(TokenizerSettings(300), former) == TokenizerSettings(300, character_coverage=0.9995)
    for other in (TokenizerSettings(301), TokenizerSettings(300, character_coverage=1.0)):
        assert resumed(other, former) == other
    assert resumed(TokenizerSettings(300), {}) == TokenizerSettings(300)


def test_lowercase(corpus, tmp_path):
    train_tokenizer(corpus.valid, tmp_path / "tok", TokenizerSettings(200, lowercase=True))
    processor, _ = load(tmp_path / "tok")
    assert processor.encode("The CLASS", out_type=str) == processor.encode("the class", out_type=str)
    assert processor.decode(processor.encode("The CLASS")) == "the class"


def test_long_lines_are_learned_from(tmp_path):
    """SentencePiece by itself skips every sentence above 4,192 bytes."""
    path = tmp_path / "long.txt"
    path.write_text("short words here\n" + "extraordinary circumlocution " * 1000)
    train_tokenizer([path], tmp_path / "tok", TokenizerSettings(22))
    assert 0 not in load(tmp_path / "tok")[0].encode("extraordinary circumlocution")


def test_counted_sample_is_bounded(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(sentencepiece_training, "COUNTED_SENTENCES", 100)
    text = sentencepiece_training.TrainingText(corpus.train)
    lines = sum(1 for _ in text)
    assert lines == text.sentences > 1000
    assert len(text.sample) == 100


def test_too_large_a_vocabulary_names_the_largest_that_works(corpus, tmp_path, capsys):
    command = ["tokenizer", "--input", str(corpus.valid[0]), "--output", str(tmp_path / "tok"), "--vocab-size"]
    assert main([*command, "900000"]) == 1
    error = capsys.readouterr().err
    match = re.fullmatch(
        r"mlsm: error: the text is too short for a vocabulary of 900000 pieces; the largest possible size is (\d+): "
        r"pass it, or a smaller one, or more text\n",
        error,
    )
    assert match, error
    assert list(tmp_path.iterdir()) == []
    assert main([*command, match[1]]) == 0
    assert sorted(path.name for path in (tmp_path / "tok").iterdir()) == ["dict.txt", "sentencepiece.bpe.model"]
    assert f"{int(match[1]):,} pieces" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "text.txt: No such file or directory"),
        (b"", [], "text.txt is empty"),
        (b"\n \n", [], "text.txt holds no text, only blank lines"),
        (b"fine\ncaf\xe9\n", [], "text.txt:2: not UTF-8 (byte 0xe9 at column 4)"),
        ("\u200b\n".encode(), [], "no text that SentencePiece can learn from"),
        (b"abc def\n", ["--vocab-size", "3"], "the smallest possible size is"),
        (b"abc def\n", ["--vocab-size", "-3"], "from 1 to 16,777,216"),
        (b"abc def\n", ["--character-coverage", "1.5"], "--character-coverage must be from 0.98 to 1, got 1.5"),
        (b"abc def\n", ["--vocab-size", "99999999999"], "from 1 to 16,777,216, got 99,999,999,999"),
        (b"abc def\n", ["--max-sentences", "0"], "--max-sentences must be at least 101, got 0"),
        (b"abc def\n", ["--max-sentences", "100"], "--max-sentences must be at least 101, got 100"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, capfd, content, options, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    output = tmp_path / "out" / "tok"
    assert main(["tokenizer", "--input", str(path), "--vocab-size", "50", "--output", str(output), *options]) == 1
    captured = capfd.readouterr()
    assert captured.err.startswith("mlsm: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not (tmp_path / "out").exists()


def test_a_failed_run_leaves_an_earlier_tokenizer_alone(corpus, tmp_path, capsys):
    train_tokenizer(corpus.valid, tmp_path / "tok", TokenizerSettings(200))
    before = (tmp_path / "tok" / "dict.txt").read_bytes()
    arguments = ["--input", str(corpus.valid[0]), "--vocab-size", "900000", "--output", str(tmp_path / "tok")]
    assert main(["tokenizer", *arguments]) == 1
    capsys.readouterr()
    assert (tmp_path / "tok" / "dict.txt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["tok"]


def test_the_learning_of_pieces_has_its_own_line(corpus, tmp_path, monkeypatch, capsys):
    """The bar of the text is full when SentencePiece begins to learn, which takes most of the time."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_TIMES", 0.001)
    train_tokenizer(corpus.valid, tmp_path / "tok", TokenizerSettings(200))
    shown = [part for part in re.split(r"[\r\n]+", capsys.readouterr().err) if part.strip()]
    begin = next(number for number, part in enumerate(shown) if part.startswith("learning pieces: 00:0"))
    assert all(part.startswith("reading text: ") for part in shown[:begin])
    assert sum(part.startswith("learning pieces: 00:0") and part.endswith(" so far") for part in shown) > 2


def test_sentencepiece_is_silent_unless_verbose(corpus, tmp_path, capfd):
    command = ["tokenizer", "--vocab-size", "200", "--input", str(corpus.valid[0]), "--output", str(tmp_path / "tok")]
    assert main(command) == 0
    assert capfd.readouterr().err == ""
    assert main([*command, "--verbose"]) == 0
    assert "trainer_interface" in capfd.readouterr().err
