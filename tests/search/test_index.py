"""An index: results, reasons, resumption, and what does not belong together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mlsm_plugin.core.files.process_rank import ProcessRank
from mlsm_plugin.core.text.unknown_tokens import UnknownTokens
from mlsm_plugin.search import index as index_module
from mlsm_plugin.search.index import SearchIndex, build_index, word_counts
from mlsm_plugin.search.settings import IndexSettings
from mlsm_plugin.search.text_codes import DictionaryCodes
from tests.cli.coding_runs import contents
from tests.search.searched import make_encoder, write_documents
from tests.tiny_hf_models import make_model_with_own_tokens
from tests.tiny_models import TinyData

SMALL = IndexSettings(shard_documents=7)


@pytest.fixture(scope="module")
def coder(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> DictionaryCodes:
    return DictionaryCodes(*make_encoder(tiny.text, tmp_path_factory.mktemp("encoder")))


@pytest.fixture
def text(tiny: TinyData, tmp_path: Path) -> Path:
    write_documents(tiny.text, tmp_path / "docs.txt")
    return tmp_path / "docs.txt"


@pytest.mark.parametrize(
    "mode", ["words", pytest.param("codes", marks=pytest.mark.slow), pytest.param("both", marks=pytest.mark.slow)]
)
def test_a_document_finds_itself_and_says_why(coder: DictionaryCodes, text: Path, tmp_path: Path, mode: str) -> None:
    figures = build_index([text], coder, tmp_path / "index", SMALL)
    assert (figures["documents"], figures["empty"]) == (30, 0)
    index = SearchIndex(tmp_path / "index", coder)
    ranks = []
    for number in range(30):
        document = index.documents[number]
        hits = index.search(document.text, mode=mode, count=30)
        ranks.append([hit.document.name == document.name for hit in hits])
        assert sum(reason.share for reason in hits[0].reasons) <= 1 + 1e-6
        for reason in hits[0].reasons:
            assert reason.label == index.labels[reason.atom]
            assert all(0 <= start < stop <= len(hits[0].document.text) for start, stop in reason.document_tokens)
    assert all(any(rank) for rank in ranks)
    assert np.mean([rank.index(True) for rank in ranks]) < (
        9 if mode == "codes" else 2
    )  # of 30; the weights are random
    index.close()


def test_the_reasons_of_a_result_by_codes_add_up_to_its_score(
    coder: DictionaryCodes, text: Path, tmp_path: Path
) -> None:
    build_index([text], coder, tmp_path / "index", SMALL)
    index = SearchIndex(tmp_path / "index", coder)
    query = index.documents[3].text
    coded = coder.coded([query])[0]
    hit = index.search(query, mode="codes", count=1)[0]
    document = next(number for number in range(30) if index.documents[number].name == hit.document.name)
    every = index._reasons(document, hit.document, query, coded, most=10**6)
    assert sum(reason.share for reason in every) == pytest.approx(1, abs=1e-5)
    assert all(reason.query_tokens and reason.document_tokens for reason in every)


def test_a_stopped_index_goes_on_and_equals_one_that_never_stopped(
    coder: DictionaryCodes, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_index([text], coder, tmp_path / "whole", SMALL)
    write = index_module._write_shard
    written: list[int] = []

    def stop_in_the_third(*arguments: object) -> UnknownTokens:
        number = arguments[3]
        assert isinstance(number, int)
        if number == 2:
            raise KeyboardInterrupt
        written.append(number)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(index_module, "_write_shard", stop_in_the_third)
    with pytest.raises(KeyboardInterrupt):
        build_index([text], coder, tmp_path / "stopped", SMALL)
    with pytest.raises(ValueError, match="not finished; run the same"):
        SearchIndex(tmp_path / "stopped", coder)

    def rest(*arguments: object) -> UnknownTokens:
        written.append(arguments[3])  # type: ignore[arg-type]
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(index_module, "_write_shard", rest)
    build_index([text], coder, tmp_path / "stopped", SMALL)
    assert written == [0, 1, 2, 3, 4]
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_processes_that_share_the_work_write_the_index_of_one_process(
    coder: DictionaryCodes, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = build_index([text], coder, tmp_path / "whole", SMALL)
    write = index_module._write_shard
    written: list[int] = []

    def noted(*arguments: object) -> None:
        written.append(arguments[3])  # type: ignore[arg-type]
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(index_module, "_write_shard", noted)
    assert build_index([text], coder, tmp_path / "shared", SMALL, ProcessRank(2, 3)) is None
    assert build_index([text], coder, tmp_path / "shared", SMALL, ProcessRank(0, 3)) is None
    with pytest.raises(ValueError, match="not finished; run the same"):
        SearchIndex(tmp_path / "shared", coder)
    assert build_index([text], coder, tmp_path / "shared", SMALL, ProcessRank(1, 2)) is None
    assert build_index([text], coder, tmp_path / "shared", SMALL, ProcessRank(0, 2)) == figures
    assert written == [2, 0, 3, 1, 4]
    assert build_index([text], coder, tmp_path / "shared", SMALL, ProcessRank(1, 3)) == figures
    assert contents(tmp_path / "shared") == contents(tmp_path / "whole")


@pytest.mark.parametrize("part", ["jsonl", "words.npz", "labels.npz", "codes.npz"])
@pytest.mark.parametrize("share", [0, 0.3, 0.99])
def test_a_damaged_shard_is_named_and_written_again(
    coder: DictionaryCodes, text: Path, tmp_path: Path, part: str, share: float
) -> None:
    figures = build_index([text], coder, tmp_path / "whole", SMALL)
    build_index([text], coder, tmp_path / "parts", SMALL, ProcessRank(0, 2))
    damaged = tmp_path / "parts" / "shards" / f"000002.{part}"
    content = damaged.read_bytes()
    damaged.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=rf"000002\.{part} is damaged; delete the files 000002\.\* beside it"):
        build_index([text], coder, tmp_path / "parts", SMALL, ProcessRank(1, 2))
    for file in damaged.parent.glob("000002.*"):
        file.unlink()
    assert build_index([text], coder, tmp_path / "parts", SMALL) == figures
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_a_text_that_changes_while_it_is_indexed_is_one_line(
    coder: DictionaryCodes, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = index_module._write_shard

    def write_and_change(*arguments: object) -> UnknownTokens:
        text.write_text("another text\n")
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(index_module, "_write_shard", write_and_change)
    with pytest.raises(ValueError, match=r"docs\.txt changed while it was indexed; delete"):
        build_index([text], coder, tmp_path / "index", SMALL)
    assert not (tmp_path / "index" / "meta.json").exists()


def test_a_process_whose_shards_another_has_merged_is_done(
    coder: DictionaryCodes, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = index_module._write_shard

    def merged_meanwhile(*arguments: object) -> UnknownTokens:
        monkeypatch.setattr(index_module, "_write_shard", write)
        build_index([text], coder, tmp_path / "index", SMALL)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(index_module, "_write_shard", merged_meanwhile)
    figures = build_index([text], coder, tmp_path / "index", SMALL, ProcessRank(0, 2))
    assert figures == build_index([text], coder, tmp_path / "whole", SMALL)
    assert contents(tmp_path / "index") == contents(tmp_path / "whole")


def test_other_files_another_model_and_no_index_are_one_line(
    coder: DictionaryCodes, text: Path, tiny: TinyData, tmp_path: Path
) -> None:
    build_index([text], coder, tmp_path / "index", SMALL)
    shutil.copy(text, tmp_path / "more.txt")
    with pytest.raises(ValueError, match=r"begun with other files: docs\.txt; name another"):
        build_index([text, tmp_path / "more.txt"], coder, tmp_path / "index", SMALL)
    make_model_with_own_tokens("bert", text, tmp_path / "other" / "text")
    other = DictionaryCodes(*make_encoder(text, tmp_path / "other"))
    with pytest.raises(ValueError, match="another model or dictionary"):
        SearchIndex(tmp_path / "index", other)
    with pytest.raises(ValueError, match="is not an index"):
        SearchIndex(tmp_path)
    by_words = SearchIndex(tmp_path / "index")
    assert by_words.search(by_words.documents[0].text, mode="words")
    with pytest.raises(ValueError, match="opened without a model"):
        by_words.search("name")
    with pytest.raises(ValueError, match="the query is empty"):
        by_words.search(" ", mode="words")


def test_a_changed_file_and_a_changed_model_say_so(coder: DictionaryCodes, text: Path, tmp_path: Path) -> None:
    build_index([text], coder, tmp_path / "index", SMALL)
    plan = json.loads((tmp_path / "index" / "plan.json").read_text())
    (tmp_path / "index" / "plan.json").write_text(json.dumps({**plan, "codes": "0"}))
    with pytest.raises(ValueError, match="was begun with another model or dictionary"):
        build_index([text], coder, tmp_path / "index", SMALL)
    text.write_text(text.read_text() + "more\n")
    with pytest.raises(ValueError, match=r"docs\.txt has changed since the index in .* was begun; name another"):
        build_index([text], coder, tmp_path / "index", SMALL)


def test_a_document_that_cannot_be_read_is_told_before_anything_is_written(
    coder: DictionaryCodes, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "late.jsonl").write_text('{"text": "a"}\n{}\n')
    with pytest.raises(ValueError, match="line 2 has no text"):
        build_index([text, tmp_path / "late.jsonl"], coder, tmp_path / "index", SMALL)
    (tmp_path / "late.jsonl").write_text('{"text": ""}\n{"text": " "}\n')
    with pytest.raises(ValueError, match="none of the 2 documents has a text"):
        build_index([tmp_path / "late.jsonl"], coder, tmp_path / "index", SMALL)
    assert not (tmp_path / "index").exists()


def test_a_folder_of_something_else_stays_as_it_is(coder: DictionaryCodes, text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"to an index, such as config\.json"):
        build_index([text], coder, folder, SMALL)
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_ids_that_repeat_are_warned_of(
    coder: DictionaryCodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "docs.jsonl").write_text('{"id": 1, "text": "name"}\n' * 3)
    build_index([tmp_path / "docs.jsonl"], coder, tmp_path / "index", SMALL)
    assert "2 of 3 documents have the id of another" in caplog.text


@pytest.mark.parametrize("how", ["cut", "emptied", "removed"])
def test_a_damaged_file_of_an_index_is_one_line(coder: DictionaryCodes, text: Path, tmp_path: Path, how: str) -> None:
    build_index([text], coder, tmp_path / "index", SMALL)
    names = sorted({path.name for path in (tmp_path / "index").iterdir()} - {"meta.json", "plan.json"})
    assert len(names) == 9
    for name in names:
        path = tmp_path / "index" / name
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] if how == "cut" else b"")
        if how == "removed":
            path.unlink()
        with pytest.raises(ValueError, match=f"{name} is missing or damaged; delete .*index and build"):
            SearchIndex(tmp_path / "index", coder)
        path.write_bytes(content)


def test_a_query_that_is_no_text_is_one_line(coder: DictionaryCodes, text: Path, tmp_path: Path) -> None:
    build_index([text], coder, tmp_path / "index", SMALL)
    with pytest.raises(ValueError, match="the query is not Unicode text"):
        SearchIndex(tmp_path / "index", coder).search("\udcff")


def test_hostile_and_empty_documents(coder: DictionaryCodes, tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    texts = ["", "\u200b", "😀" * 50, "a" * 20_000, "name \u202e value", "<mask> [CLS]"]

    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    figures = build_index([path], coder, tmp_path / "index", SMALL)
    assert figures["documents"] == len(texts)
    index = SearchIndex(tmp_path / "index", coder)
    assert index.search("name value")[0].document.text == texts[4]
    assert index.search("zzzz qqqq", mode="words") == []


def test_unknown_tokens_are_warned_of_and_find_nothing(
    coder: DictionaryCodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "docs.txt").write_text("the name of a value\n\n漢字\n")
    figures = build_index([tmp_path / "docs.txt"], coder, tmp_path / "index", SMALL)
    assert figures["empty"] == 1
    assert "of the documents are unknown; most frequent unknown characters: '字' U+5B57 (1 times)" in caplog.text
    index = SearchIndex(tmp_path / "index", coder)
    caplog.clear()
    assert index.search("語学", mode="both") == []
    assert "100.00% of the tokens of the query are unknown" in caplog.text
    assert index.search("漢字", mode="both")[0].words == ("漢字",)


def test_words_are_lower_case_and_of_two_characters() -> None:
    counts = word_counts(["The the a THE", ""])
    assert counts.sum() == 3
    assert counts[1].nnz == 0
