"""The summaries of atoms, compared with a plain loop; and the page, which no token can break."""

from __future__ import annotations

import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from mlsm_plugin.reports import latent_report
from mlsm_plugin.reports.latent_report import AtomSummary, marks_legend, render_report, set_neighbours, summarize_atoms

SYMBOLS = ["<s>", "<pad>", "</s>", "<unk>", "▁the", "▁cat", "s", "▁sleep", "."]


def test_summaries_by_hand() -> None:
    # <s> the cat s </s> | sleep . </s>
    first = (np.array([0, 4, 5, 6, 2]), csr_matrix([[0, 0, 0], [1, 0, 0], [0.25, 0.75, 0], [0, 1, 0], [0, 0, 0]]))
    second = (np.array([7, 8, 2]), csr_matrix([[0, 1, 0], [0.75, 0.25, 0], [0, 0, 0]]))
    summaries = summarize_atoms([first, second], num_atoms=3, num_types=9, symbols=SYMBOLS, window=2)
    assert [(summary.atom, summary.frequency, summary.mean_weight) for summary in summaries] == [
        (0, 3 / 5, 2 / 3),
        (1, 4 / 5, 0.75),
        (2, 0.0, 0.0),
    ]
    assert [summary.top_tokens for summary in summaries] == [
        [("▁the", 0.5), (".", 0.375), ("▁cat", 0.125)],
        [("s", 1 / 3), ("▁sleep", 1 / 3), ("▁cat", 0.25), (".", 0.25 / 3)],
        [],
    ]
    assert [summary.contexts for summary in summaries] == [
        [
            {"left": "", "token": "the", "right": " cats", "weight": 1.0, "marks": [(4, 3, 0.25)]},
            {"left": "sleep", "token": ".", "right": " ¶", "weight": 0.75, "marks": []},
            {"left": "the ", "token": "cat", "right": "s ¶", "weight": 0.25, "marks": [(0, 3, 1.0)]},
        ],
        [
            {"left": "the cat", "token": "s", "right": " ¶", "weight": 1.0, "marks": [(4, 3, 0.75)]},
            {"left": "", "token": "sleep", "right": ". ¶", "weight": 1.0, "marks": [(5, 1, 0.25)]},
            {"left": "the ", "token": "cat", "right": "s ¶", "weight": 0.75, "marks": [(7, 1, 1.0)]},
            {"left": "sleep", "token": ".", "right": " ¶", "weight": 0.25, "marks": [(0, 5, 1.0)]},
        ],
        [],
    ]
    assert [summary.examples for summary in summaries] == [[], [], []]  # all are among the contexts
    # 0.25 is 4 half octaves below 1, and 0.75 is in the last
    assert [summary.histogram[-4:] for summary in summaries] == [[1, 0, 0, 2], [1, 0, 0, 3], [0, 0, 0, 0]]


def repeated_codes(shares: list[list[float]], number: int = 400) -> list[AtomSummary]:
    """Summaries of a text in which token ``i`` has the codes of the row ``i``; the last type is half of the text."""
    types = len(shares)
    rng = np.random.default_rng(1)
    ids = rng.choice(types, size=number * types, p=[0.5 / (types - 1)] * (types - 1) + [0.5])
    codes = np.array(shares)[ids] * rng.uniform(0.01, 1.0, (len(ids), 1))
    symbols = [f"w{index}" for index in range(types)]
    return summarize_atoms(
        [(ids, csr_matrix(codes))], num_atoms=len(shares[0]), num_types=types, symbols=symbols, window=2
    )


def test_an_atom_is_called_by_what_it_has_more_than_others_and_related_words_tell_most() -> None:
    theme, word, everywhere = [1, 0, 0.1], [0, 1, 0.1], [0.2, 0.2, 1]
    summaries = repeated_codes([theme, theme, theme, word, [0, 0, 0.1], everywhere])
    assert sorted(summaries[0].label) == ["w0", "w1", "w2"]
    assert summaries[0].top_tokens[0][0] != "w5" or summaries[0].top_tokens[0][1] < 0.5
    assert summaries[1].label == ["w3"]
    assert "w5" in summaries[2].label
    assert summaries[0].telling == max(summary.telling for summary in summaries)


def test_examples_are_from_the_whole_range_of_weights() -> None:
    (atom,) = repeated_codes([[0.5], [0.5], [0.9]], number=2000)
    highest = [context["weight"] for context in atom.contexts]
    weights = [context["weight"] for context in atom.examples]
    assert min(highest) > 0.4
    assert len(weights) == 3
    assert weights == sorted(weights, reverse=True)
    assert weights[0] > 0.3
    assert weights[1] < 0.5
    assert weights[2] < 0.2
    assert sum(atom.histogram) == 6000
    again = repeated_codes([[0.5], [0.5], [0.9]], number=2000)
    assert again == [atom]


def test_the_nearest_atoms_are_those_of_the_largest_cosine() -> None:
    atoms = np.random.default_rng(0).normal(size=(50, 6))
    summaries = [AtomSummary(atom, 0.5, 0.5) for atom in range(50)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_report, "NEIGHBOUR_ROWS", 7)
        set_neighbours(summaries, atoms * np.arange(1, 51)[:, None])
    unit = atoms / np.linalg.norm(atoms, axis=1, keepdims=True)
    cosines = unit @ unit.T - 2 * np.eye(50)
    for atom, summary in enumerate(summaries):
        assert [number for number, _ in summary.neighbours] == np.argsort(-cosines[atom])[:4].tolist()
        assert [cosine for _, cosine in summary.neighbours] == pytest.approx(np.sort(-cosines[atom])[:4] * -1, abs=1e-5)


@pytest.mark.parametrize(
    ("symbols", "left", "token", "right", "legend"),
    [
        (["the", "farm", "##er", "##s"], "the farm", "er", "s", "## continues a word. "),
        (["[CLS]", "farm", "##er", "[SEP]"], "farm", "er", " ¶", "## continues a word. "),
        (["▁the", "▁farm", "er", "s"], "the farm", "er", "s", "▁ begins a word. "),
        (["Ġthe", "Ġfarm", "er", "s"], "the farm", "er", "s", "Ġ begins a word. "),
        (["the", "farm", "er", "##"], "the farm ", "er", " ##", ""),
    ],
)
def test_words_are_whole_in_contexts_and_marks_are_explained(
    symbols: list[str], left: str, token: str, right: str, legend: str
) -> None:
    codes = csr_matrix(np.array([[0.0], [0.0], [1.0], [0.0]]))
    (atom,) = summarize_atoms([(np.arange(4), codes)], num_atoms=1, num_types=4, symbols=symbols)
    assert atom.contexts == [{"left": left, "token": token, "right": right, "weight": 1.0, "marks": []}]
    assert marks_legend(symbols) == legend


@pytest.mark.slow
def test_three_thousand_atoms_of_real_text_are_at_most_three_megabytes(tmp_path: Path) -> None:
    """Every atom has all its tokens, contexts and neighbours; pieces are words, longer than those of models."""
    manual = Path(__file__).parents[1] / "python_manual.txt.gz"
    words = re.findall(r"\w+|[^\w\s]", gzip.decompress(manual.read_bytes()).decode())[:150_000]
    symbols = sorted({f"▁{word}" for word in words})
    numbers = {symbol: number for number, symbol in enumerate(symbols)}
    ids = np.array([numbers[f"▁{word}"] for word in words])
    rng = np.random.default_rng(0)
    columns = rng.integers(0, 3000, (len(ids), 8)).ravel()
    weights = rng.dirichlet(np.full(8, 2.0), len(ids)).ravel()
    codes = csr_matrix((weights, columns, np.arange(0, len(columns) + 1, 8)), shape=(len(ids), 3000))
    summaries = summarize_atoms([(ids, codes)], num_atoms=3000, num_types=len(symbols), symbols=symbols)
    set_neighbours(summaries, rng.normal(size=(3000, 64)))
    for summary in summaries:
        summary.raised = rng.choice(symbols, 5).tolist()
        summary.lowered = rng.choice(symbols, 5).tolist()
    assert all(len(summary.contexts) == 4 and len(summary.neighbours) == 4 for summary in summaries)
    assert np.mean([len(summary.examples) for summary in summaries]) > 2.5
    render_report(summaries, title="atoms", facts={}, output_path=tmp_path / "page.html")
    assert 2_000_000 < (tmp_path / "page.html").stat().st_size <= 3_000_000


@pytest.mark.parametrize("chunk", [1, 1000])
def test_marks_and_whole_words_equal_a_plain_loop(chunk: int) -> None:
    """Each context, read from the ids and codes around its token, one token after the other."""
    rng = np.random.default_rng(3)
    pieces = [*SYMBOLS, "▁dog", "gy", "▁of", "ly"]
    blocks = []
    for length in (40, 1, 25, 0, 60):
        weights = rng.random((length, 3)) * (rng.random((length, 3)) < 0.4)
        blocks.append((rng.integers(2, len(pieces), length), weights.astype(np.float32)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_report, "CHUNK_ENTRIES", chunk)
        summaries = summarize_atoms(
            ((ids, csr_matrix(codes)) for ids, codes in blocks),
            num_atoms=3, num_types=len(pieces), symbols=pieces, contexts=50, window=4,
        )  # fmt: skip
    expected = [plain_contexts(blocks, pieces, atom, window=4) for atom in range(3)]
    number = 0
    for summary, contexts in zip(summaries, expected, strict=True):
        for context in summary.contexts + summary.examples:
            assert context in contexts
            number += len(context["marks"])
    assert number > 100


def plain_contexts(
    blocks: list[tuple[np.ndarray, np.ndarray]], pieces: list[str], atom: int, window: int
) -> list[dict[str, Any]]:
    """All contexts of an atom."""
    contexts = []
    for ids, codes in blocks:
        words = [pieces[number] for number in ids]
        begins = [word.startswith("▁") or word == "</s>" for word in words]
        for place in np.flatnonzero(codes[:, atom]).tolist():
            first, last = max(0, place - window), min(len(ids), place + window + 1)
            if first > 0:  # the first word is cut
                first = next((number for number in range(first, place + 1) if begins[number]), first)
            if last < len(ids) and not begins[last]:
                last = next((number for number in range(last, place, -1) if begins[number]), last)
            text, spans = "", {}
            for number in range(first, last):
                piece = " ¶ " if words[number] == "</s>" else words[number].replace("▁", " ")
                text += piece.lstrip() if not text or text.endswith(" ") else piece
                spans[number] = (len(text.rstrip()) - len(piece.strip()), len(piece.strip()))
            start, length = spans.pop(place)
            contexts.append(
                {
                    "left": text[:start],
                    "token": text[start : start + length],
                    "right": text[start + length :].rstrip(),
                    "weight": float(codes[place, atom]),
                    "marks": [
                        (*span, float(codes[number, atom])) for number, span in spans.items() if codes[number, atom]
                    ],
                }
            )
    return contexts


def test_few_types_are_filled_up_with_other_texts() -> None:
    ids = np.array([4, 5, 2, 4, 5, 2, 5, 7])
    weights = np.array([0, 0.5, 0, 0, 0.75, 0, 0.625, 0.25])
    (atom,) = summarize_atoms(
        [(ids, csr_matrix(weights[:, None]))], num_atoms=1, num_types=9, symbols=SYMBOLS, contexts=3, window=1
    )
    # "the cat ¶" occurs twice and is shown once; "sleep" is of another type and comes before the second "cat".
    assert [(c["left"], c["token"], c["right"], c["weight"]) for c in atom.contexts] == [
        ("the ", "cat", " ¶", 0.75),
        ("¶ ", "cat", " sleep", 0.625),
        ("cat ", "sleep", "", 0.25),
    ]


def test_words_are_joined_by_spaces_where_no_piece_marks_them() -> None:
    symbols = ["a", "b", "c"]
    (atom,) = summarize_atoms(
        [(np.array([0, 1, 2]), csr_matrix([[0.0], [1.0], [0.0]]))], num_atoms=1, num_types=3, symbols=symbols
    )
    assert atom.contexts == [{"left": "a ", "token": "b", "right": " c", "weight": 1.0, "marks": []}]


def brute_force(
    blocks: list[tuple[np.ndarray, np.ndarray]], num_atoms: int, top_tokens: int, contexts: int, window: int
) -> list[dict[str, Any]]:
    """Frequency, mean weight, top types with shares, and (weight, type) of the contexts, by plain loops."""
    coded = sum(int((codes > 0).any(axis=1).sum()) for _, codes in blocks)
    answers = []
    for atom in range(num_atoms):
        found = []  # (weight, order, type, window)
        for number, (ids, codes) in enumerate(blocks):
            padded = [-1] * window + ids.tolist() + [-1] * window
            for row, token_type in enumerate(ids.tolist()):
                if codes[row, atom] > 0:
                    around = tuple(padded[row : row + 2 * window + 1])
                    found.append((-codes[row, atom], (number, row), token_type, around))
        found.sort()
        total = -sum(weight for weight, *_ in found)
        mass = {token_type: 0.0 for _, _, token_type, _ in found}
        for weight, _, token_type, _ in found:
            mass[token_type] -= weight
        best, seen_types, seen_windows = [], set(), set()
        for entry in found:
            if entry[2] not in seen_types and len(best) < contexts:
                best.append(entry)
                seen_types.add(entry[2])
                seen_windows.add(entry[3])
        for entry in found:
            if entry[3] not in seen_windows and len(best) < contexts:
                best.append(entry)
                seen_windows.add(entry[3])
        answers.append(
            {
                "frequency": len(found) / max(coded, 1),
                "mean_weight": total / max(len(found), 1),
                "top": sorted(((t, m / total) for t, m in mass.items()), key=lambda pair: (-pair[1], pair[0]))[
                    :top_tokens
                ],
                "contexts": [(-weight, token_type) for weight, _, token_type, _ in sorted(best)],
            }
        )
    return answers


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(0, 12), max_size=6),
    num_atoms=st.integers(1, 5),
    num_types=st.integers(1, 6),
    contexts=st.integers(1, 5),
    window=st.integers(0, 3),
    chunk=st.sampled_from([1, 7, 1000]),
)
def test_summaries_equal_a_plain_loop(
    seed: int, lengths: list[int], num_atoms: int, num_types: int, contexts: int, window: int, chunk: int
) -> None:
    rng = np.random.default_rng(seed)
    blocks = []
    for length in lengths:
        # Multiples of 1/8: sums are exact and there are ties.
        codes = rng.integers(0, 9, (length, num_atoms)) * (rng.random((length, num_atoms)) < 0.5) / 8
        blocks.append((rng.integers(0, num_types, length), codes))
    symbols = [chr(ord("a") + index) for index in range(num_types)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_report, "CHUNK_ENTRIES", chunk)
        summaries = summarize_atoms(
            ((ids, csr_matrix(codes.astype(np.float32))) for ids, codes in blocks),
            num_atoms=num_atoms,
            num_types=num_types,
            symbols=symbols,
            top_tokens=3,
            contexts=contexts,
            window=window,
        )
    expected = brute_force(blocks, num_atoms, 3, contexts, window)
    for summary, answer in zip(summaries, expected, strict=True):
        assert summary.frequency == answer["frequency"]
        assert summary.mean_weight == answer["mean_weight"]
        assert summary.top_tokens == [(symbols[token_type], share) for token_type, share in answer["top"]]
        assert [(c["weight"], c["token"]) for c in summary.contexts] == [
            (weight, symbols[token_type]) for weight, token_type in answer["contexts"]
        ]


@pytest.mark.parametrize(
    ("ids", "shape", "num_symbols", "message"),
    [
        ([4, 5], (3, 2), 9, r"codes of shape \(3, 2\) for 2 tokens and 2 atoms"),
        ([4, 5], (2, 3), 9, r"codes of shape \(2, 3\) for 2 tokens and 2 atoms"),
        ([4, 9], (2, 2), 9, "token ids from 4 to 9, but there are 9 token types"),
        ([4, 5], (2, 2), 8, "9 token types need as many symbols; there are 8"),
    ],
)
def test_what_does_not_match_is_an_error(
    ids: list[int], shape: tuple[int, int], num_symbols: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        summarize_atoms([(np.array(ids), csr_matrix(shape))], num_atoms=2, num_types=9, symbols=SYMBOLS[:num_symbols])


def atoms_of(page: str) -> list[dict[str, Any]]:
    """The data in a page."""
    data = json.loads(Page(page).texts["data"])
    atoms = [dict(zip(data["keys"], row, strict=True)) for row in data["rows"]]
    for atom in atoms:
        for key in ("label", "raised", "lowered"):
            atom[key] = [data["pieces"][number] for number in atom[key]]
        atom["tokens"] = [[data["pieces"][number], share] for number, share in atom["tokens"]]
    return atoms


HOSTILE = "</script><img src=x onerror=alert(1)>{{facts}}<!--\u2028&amp;"


class Page(HTMLParser):
    """Tags with their attributes, and the text of the elements of interest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._inside: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag not in ("meta", "input", "img", "br", "link"):
            self._inside.append(attributes.get("id") or tag)

    def handle_endtag(self, tag: str) -> None:
        self._inside.pop()

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside[-1]] = self.texts.get(self._inside[-1], "") + data


@pytest.fixture
def page(tmp_path: Path) -> str:
    summaries = [
        AtomSummary(
            0,
            0.123456,
            1 / 3,
            [(HOSTILE, 1.0)],
            [{"left": HOSTILE, "token": "a\ud800", "right": "", "weight": 0.5, "marks": [(0, 3, 0.25)]}],
            [{"left": HOSTILE, "token": HOSTILE, "right": HOSTILE, "weight": 0.125, "marks": []}],
            [HOSTILE],
            1.5,
            [0, 900, 500],
            [(1, 0.25)],
            name=HOSTILE,
            raised=[HOSTILE, "other"],
            lowered=["a\ud800"],
        ),
        AtomSummary(1, 0.0, 0.0),
    ]
    path = tmp_path / "report.html"
    render_report(summaries, title=HOSTILE, facts={HOSTILE: HOSTILE, "atoms": "2"}, output_path=path)
    assert [item.name for item in tmp_path.iterdir()] == ["report.html"]
    return path.read_text(encoding="utf-8")


def test_hostile_text_is_inert(page: str) -> None:
    parsed = Page(page)
    assert not [tag for tag, _ in parsed.tags if tag == "img"]
    assert [tag for tag, _ in parsed.tags].count("script") == 2
    assert not [name for _, attributes in parsed.tags for name in attributes if name.startswith("on")]
    assert parsed.texts["title"] == parsed.texts["h1"] == parsed.texts["td"].removesuffix("2") == HOSTILE
    first, dead = atoms_of(page)
    assert first == {
        "atom": 0,
        "frequency": 0.123,
        "weight": 0.333,
        "label": [HOSTILE],
        "called": HOSTILE,
        "telling": 1.5,
        "bars": "095",
        "near": [[1, 0.25]],
        "tokens": [[HOSTILE, 1.0]],
        "raised": [HOSTILE, "other"],
        "lowered": ["a\ud800"],
        "contexts": [[HOSTILE, "a\ud800", "", 0.5, 9, [0, 3, 4]]],
        "examples": [[HOSTILE, HOSTILE, HOSTILE, 0.125, 2]],
    }
    assert (dead["frequency"], dead["contexts"], dead["bars"]) == (0.0, [], "")


def test_the_page_needs_nothing_from_outside(page: str) -> None:
    parsed = Page(page)
    assert not {"link", "iframe", "object", "embed", "base"} & {tag for tag, _ in parsed.tags}
    assert not [attributes for _, attributes in parsed.tags if {"src", "href"} & set(attributes)]
    links = set(re.findall(r"\w+://[^\s\"')]*", page))
    assert links == {"http://www.w3.org/2000/svg"}  # the name of a namespace, never fetched
    assert "url(" not in page
    assert "@import" not in page
    policy = [attributes["content"] for _, attributes in parsed.tags if "http-equiv" in attributes]
    (only,) = policy
    assert re.fullmatch(r"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-[^ ']{44}'; .*", only)


def test_every_control_has_a_label(page: str) -> None:
    form = page[page.index("<form") : page.index("</form>")]
    assert len(re.findall(r"<label ", form)) == len(re.findall(r"<(?:input|select)", form)) == 3
    assert 'lang="en"' in page
    assert 'aria-live="polite"' in page


def test_marks_of_the_page_count_as_javascript_does() -> None:
    context = {"left": "\U0001f600 a ", "token": "b", "right": " c", "weight": 1.0, "marks": [(2, 1, 0.5), (6, 1, 1.0)]}
    *_, marks = latent_report._cells(context, 1.0)
    text = (context["left"] + context["token"] + context["right"]).encode("utf-16-le")
    for (start, length, _), (first, number) in zip(context["marks"], [marks[0:2], marks[3:5]], strict=True):
        marked = text[2 * first : 2 * (first + number)].decode("utf-16-le")
        assert marked == (context["left"] + context["token"] + context["right"])[start : start + length]
    assert [marks[0], marks[3]] == [3, 7]
