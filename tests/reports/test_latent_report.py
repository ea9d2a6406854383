"""The summaries of atoms, compared with a plain loop; and the page, which no token can break."""

from __future__ import annotations

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
from mlsm_plugin.reports.latent_report import AtomSummary, render_report, summarize_atoms

SYMBOLS = ["<s>", "<pad>", "</s>", "<unk>", "▁the", "▁cat", "s", "▁sleep", "."]


def test_summaries_by_hand() -> None:
    # <s> the cat s </s> | sleep . </s>
    first = (np.array([0, 4, 5, 6, 2]), csr_matrix([[0, 0, 0], [1, 0, 0], [0.25, 0.75, 0], [0, 1, 0], [0, 0, 0]]))
    second = (np.array([7, 8, 2]), csr_matrix([[0, 1, 0], [0.75, 0.25, 0], [0, 0, 0]]))
    summaries = summarize_atoms([first, second], num_atoms=3, num_types=9, symbols=SYMBOLS, window=2)
    assert summaries == [
        AtomSummary(
            atom=0,
            frequency=3 / 5,
            mean_weight=2 / 3,
            top_tokens=[("▁the", 0.5), (".", 0.375), ("▁cat", 0.125)],
            contexts=[
                {"left": "", "token": "the", "right": " cats", "weight": 1.0},
                {"left": "sleep", "token": ".", "right": " ¶", "weight": 0.75},
                {"left": "the ", "token": "cat", "right": "s ¶", "weight": 0.25},
            ],
        ),
        AtomSummary(
            atom=1,
            frequency=4 / 5,
            mean_weight=0.75,
            top_tokens=[("s", 1 / 3), ("▁sleep", 1 / 3), ("▁cat", 0.25), (".", 0.25 / 3)],
            contexts=[
                {"left": "the cat", "token": "s", "right": " ¶", "weight": 1.0},
                {"left": "", "token": "sleep", "right": ". ¶", "weight": 1.0},
                {"left": "the ", "token": "cat", "right": "s ¶", "weight": 0.75},
                {"left": "sleep", "token": ".", "right": " ¶", "weight": 0.25},
            ],
        ),
        AtomSummary(atom=2, frequency=0.0, mean_weight=0.0, top_tokens=[], contexts=[]),
    ]


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
    assert atom.contexts == [{"left": "a ", "token": "b", "right": " c", "weight": 1.0}]


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
            0, 0.123456, 1 / 3, [(HOSTILE, 1.0)], [{"left": HOSTILE, "token": "a\ud800", "right": "", "weight": 0.5}]
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
    assert json.loads(parsed.texts["data"]) == [
        {
            "atom": 0,
            "frequency": 0.1235,
            "weight": 0.3333,
            "tokens": [[HOSTILE, 1.0]],
            "contexts": [[HOSTILE, "a\ud800", "", 0.5]],
        },
        {"atom": 1, "frequency": 0.0, "weight": 0.0, "tokens": [], "contexts": []},
    ]


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
