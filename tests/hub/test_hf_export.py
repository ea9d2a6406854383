"""Checkpoints exported to Hugging Face: stock classes load the files and compute the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, FillMaskPipeline

from mlsm_plugin import hub
from mlsm_plugin.fairseq_plugin.data.token_blocks import load_split
from mlsm_plugin.hub import hf_export, stock_models
from tests.conftest import Pipeline, failing_mlsm, fairseq_train, mlsm
from tests.tiny_hf_models import make_tokenizer
from tests.tiny_models import MASKED_LM, save_untrained

Capture = pytest.CaptureFixture[str]
ODD_LINES = ["  Two  spaces\tand a tab. ", "Ünïcödé ﬁ ½ … 雪 — “quotes”", "x" * 300, "a <mask> b", "(a) 1,000.5%", "é"]


@pytest.fixture(scope="module")
def text(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    lines = pipeline.train_text.read_text(encoding="utf-8").splitlines()[:1200]
    path.write_text("\n".join([*ODD_LINES[:3], *ODD_LINES[4:], *lines]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def exported(pipeline: Pipeline, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("hf") / "auxiliary"
    mlsm("convert", pipeline.auxiliary.parent, output, "--text", text)
    return output


def test_stock_classes_compute_what_fairseq_computes(pipeline: Pipeline, exported: Path) -> None:
    ours = hub.from_pretrained(pipeline.auxiliary)
    ours.max_unk_rate = 1
    tokenizer, theirs = AutoTokenizer.from_pretrained(exported), AutoModelForMaskedLM.from_pretrained(exported).eval()
    assert json.loads((exported / "config.json").read_text())["architectures"] == ["RobertaForMaskedLM"]
    assert not list(exported.glob("*.py"))
    batch = tokenizer(["The <mask> is bound.", "A much longer sentence of names."], padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = theirs(**batch).logits
        for row, ids, mask in zip(logits, batch["input_ids"], batch["attention_mask"], strict=True):
            own = ours.model(ids[mask.bool()][None])[0][0]
            torch.testing.assert_close(row[mask.bool()], own, rtol=0, atol=1e-4)
    special = ours.task.source_dictionary.symbols[:4]
    for masked in ("The <mask> is bound.", "<mask> is bound.", "The name is <mask>.", "A (<mask>), un<mask>ed."):
        alone = masked if masked.count("<mask>") == 1 else masked.replace("un<mask>", "un")
        filled = FillMaskPipeline(theirs, tokenizer, top_k=3)(alone)
        expected = ours.fill_mask(alone, topk=3)
        scores = {found["token_str"]: found["score"] for found in filled if found["token_str"] not in special}
        assert scores
        for (_, score, _), theirs_score in zip(expected, scores.values(), strict=False):
            assert score == pytest.approx(theirs_score, rel=1e-4)
        assert tokenizer(masked)["input_ids"] == ours._encode_with_masks(masked)[0]
    for line in ODD_LINES:
        assert tokenizer(line)["input_ids"] == ours._encode_with_masks(line)[0]
    pair = tokenizer("One.", "Two.")["input_ids"]
    assert pair == ours.encode("One.", "Two.").tolist()
    assert tokenizer.decode(tokenizer("The name is bound.")["input_ids"], skip_special_tokens=True).strip() == (
        "The name is bound."
    )
    assert tokenizer.model_max_length == ours.model.max_positions()


@pytest.mark.slow
def test_user_symbols_stay_one_piece_in_data_and_in_the_exported_tokenizer(
    english_text: tuple[Path, Path], tmp_path: Path
) -> None:
    symbols = ["[url]", "@user", "inging", "<="]
    english = english_text[0].read_text(encoding="utf-8").splitlines()[:200]
    lines = [f"{line}{' ' * (i % 2)}{symbols[i % 4]}{line[:5]} url user sing" for i, line in enumerate(english)]
    (tmp_path / "text").write_text("\n".join(lines), encoding="utf-8")
    tokenizer = ("tokenizer", "--input", tmp_path / "text", "--vocab-size", 400, "--output", tmp_path / "tok")
    mlsm(*tokenizer, "--user-symbols", *symbols)
    splits = ("--train", tmp_path / "text", "--valid", tmp_path / "text")
    mlsm("binarize", "--tokenizer", tmp_path / "tok", *splits, "--output", tmp_path / "data-bin")
    ours = hub.from_pretrained(save_untrained(tmp_path / "data-bin", tmp_path / "model", **MASKED_LM))
    dictionary = ours.task.source_dictionary
    data = load_split(str(tmp_path / "data-bin" / "train"), dictionary)
    ids = torch.cat([data[number] for number in range(len(data))])
    for symbol in symbols:
        assert int((ids == dictionary.index(symbol)).sum()) == sum(line.count(symbol) for line in lines) > 40
    mlsm("convert", tmp_path / "model", tmp_path / "hf", "--text", tmp_path / "text")
    exported = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in ("[url]", "a[url]b", "[url][url] @users", "singinging", "x<=y", "  [url]  ", "[url", "url]"):
        assert exported(text)["input_ids"] == ours.encode(text).tolist()
        assert exported.decode(exported(text)["input_ids"], skip_special_tokens=True).split() == text.split()


@pytest.mark.slow
def test_latent_head_and_span_masks_are_kept(pipeline: Pipeline, text: Path, tmp_path: Path, capsys: Capture) -> None:
    flags = ("--max-update", 2, "--mlm-weight", 1, "--disable-validation")
    fairseq_train(pipeline.data_bin, tmp_path / "mlsm", *flags)
    mlsm("convert", tmp_path / "mlsm", tmp_path / "out", "--text", text, "--lines", 20)
    assert "the projection to 48 atoms" in capsys.readouterr().out
    ours = hub.from_pretrained(tmp_path / "mlsm")
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    head = load_file(tmp_path / "out" / "latent_head.safetensors")
    tokens = ours.encode("The name is bound.")
    with torch.no_grad():
        hidden = theirs.roberta(input_ids=tokens[None]).last_hidden_state
        transformed = theirs.lm_head.layer_norm(torch.nn.functional.gelu(theirs.lm_head.dense(hidden)))
        latent = torch.nn.functional.linear(transformed, head["weight"], head["bias"]).softmax(dim=-1)
    torch.testing.assert_close(latent, ours.latent_distribution(tokens), rtol=1e-4, atol=1e-6)

    fairseq_train(
        *(pipeline.data_bin, tmp_path / "npm", "--max-update", 1, "--disable-validation", "--group-size", 4),
        task="nonparametric_masked_lm",
    )
    mlsm("convert", tmp_path / "npm", tmp_path / "npm-out", "--text", text, "--lines", 5)
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "npm-out").convert_tokens_to_ids("<mask_e>")
        == len(ours.task.source_dictionary) + 1
    )
    assert not (tmp_path / "npm-out" / "latent_head.safetensors").exists()


def test_files_that_do_not_prove_themselves_are_not_written(
    pipeline: Pipeline, text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("convert", pipeline.auxiliary, tmp_path / "out", "--text", text, "--lines", 5)
    weights = stock_models.roberta_weights

    def changed(factor: float) -> Any:
        def of(*args: Any) -> dict[str, torch.Tensor]:
            found = weights(*args)
            return {name: value * factor if name == "lm_head.dense.weight" else value for name, value in found.items()}

        return of

    for factor in (1.01, float("nan")):
        with monkeypatch.context() as patch:
            patch.setattr(stock_models, "roberta_weights", changed(factor))
            assert re.search("the exported model's logits differ by .* on '", failing_mlsm(capsys, *words))
        assert not (tmp_path / "out").exists()

    def one_embedding(*args: Any) -> dict[str, torch.Tensor]:
        found = weights(*args)
        for name in ("roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"):
            found[name][300] += 0.01
        return found

    with monkeypatch.context() as patch:
        patch.setattr(stock_models, "roberta_weights", one_embedding)
        assert "the exported model has another embedding of '" in failing_mlsm(capsys, *words)
    assert not (tmp_path / "out").exists()
    tokenizer = hf_export.fast_tokenizer

    def without_normalizer(interface: Any) -> Any:
        found = tokenizer(interface)
        found.backend_tokenizer.normalizer = None
        return found

    def marking_every_part(interface: Any) -> Any:
        found = tokenizer(interface)
        steps = list(found.backend_tokenizer.pre_tokenizer)
        steps[0] = pre_tokenizers.Metaspace(prepend_scheme="always")
        found.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        return found

    for wrong, line in ((without_normalizer, "Two spaces"), (marking_every_part, "<mask>")):
        with monkeypatch.context() as patch:
            patch.setattr(hf_export, "fast_tokenizer", wrong)
            message = failing_mlsm(capsys, *words)
        assert "the exported tokenizer gives other ids for" in message
        assert line in message
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_ties_between_equally_probable_cuts_are_counted(pipeline: Pipeline, tmp_path: Path, capsys: Capture) -> None:
    text = pipeline.train_text.read_text(encoding="utf-8").splitlines()
    lines = [line for line in text if "****" in line or "====" in line]
    ours = hub.from_pretrained(pipeline.auxiliary)
    proof = hf_export.export(ours, tmp_path / "out", lines)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tied = [line for line in lines if tokenizer(line)["input_ids"] != ours.encode(line).tolist()]
    assert 0 < proof.reordered == len(tied)
    (tmp_path / "tied.txt").write_text("\n".join([*tied, "No tie."]) + "\n", encoding="utf-8")
    mlsm("convert", pipeline.auxiliary, tmp_path / "again", "--text", tmp_path / "tied.txt")
    printed = capsys.readouterr().out
    assert "ids are the same on 1 lines" in printed
    assert f"on {len(tied)} more lines the same pieces come in another order" in printed


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "npm"), [("word_piece", False), ("byte_level", True)])
def test_models_with_a_hugging_face_tokenizer_keep_it(
    kind: str, npm: bool, pipeline: Pipeline, tmp_path: Path, capsys: Capture
) -> None:
    make_tokenizer(kind, pipeline.train_text, tmp_path / "tokenizer")
    texts = ("--train", pipeline.train_text, "--valid", pipeline.valid_text)
    mlsm("binarize", "--tokenizer", f"hf:{tmp_path}/tokenizer", *texts, "--output", tmp_path / "data-bin")
    objective = {"task": "nonparametric_masked_lm"} if npm else {"task": "taco"}
    fairseq_train(
        *(tmp_path / "data-bin", tmp_path / "model", "--max-update", 2, "--disable-validation"),
        *(("--group-size", 4) if npm else ()),
        **objective,
    )
    mlsm("convert", tmp_path / "model", tmp_path / "out", "--text", pipeline.valid_text, "--lines", 50)
    assert "ids are the same on 50 lines" in capsys.readouterr().out

    own, tokenizer = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("tokenizer", "out"))
    ours = hub.from_pretrained(tmp_path / "model")
    theirs = (AutoModel if npm else AutoModelForMaskedLM).from_pretrained(tmp_path / "out").eval()
    text = f"{own.mask_token} is bound."
    assert tokenizer(text)["input_ids"] == own(text)["input_ids"]
    assert len(tokenizer) == len(ours.task.source_dictionary) == theirs.config.vocab_size
    assert (tokenizer.convert_tokens_to_ids("<mask_e>") == len(own) + 1) is npm
    assert tokenizer.model_max_length == ours.model.max_positions()
    if not npm:
        filled = FillMaskPipeline(theirs, tokenizer, top_k=3)(text)
        expected = ours.fill_mask("<mask> is bound.", topk=3)
        assert [found["score"] for found in filled] == pytest.approx([score for _, score, _ in expected], rel=1e-4)
    batch = tokenizer(["One.", "A much longer sentence of names.", "x " * 80], padding=True, truncation=True)
    assert "token_type_ids" not in batch
    with torch.no_grad():  # no position is beyond the table, and padding changes nothing
        rows = theirs(**batch.convert_to_tensors("pt"))[0]
        alone = theirs(**tokenizer("One.", return_tensors="pt"))[0]
    torch.testing.assert_close(rows[0, : alone.size(1)], alone[0], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_models_that_stock_roberta_cannot_be_are_refused(
    pipeline: Pipeline, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    short = ("--max-update", 1, "--disable-validation")
    fairseq_train(
        *(pipeline.data_bin, tmp_path / "denoising", "--arch", "denoising_small", *short), task="span_denoising"
    )
    fairseq_train(pipeline.data_bin, tmp_path / "prenorm", "--encoder-normalize-before", *short, task="masked_lm")
    for file in ("dict.txt", "sentencepiece.bpe.model"):
        (tmp_path / "prenorm" / file).write_bytes((pipeline.data_bin / file).read_bytes())
    for name, message in (
        ("denoising", "this is an encoder-decoder"),
        ("prenorm", "a model with --encoder-normalize-before cannot be exported"),
    ):
        line = failing_mlsm(capsys, "convert", tmp_path / name, tmp_path / "out", "--text", text)
        assert message in line
    assert not (tmp_path / "out").exists()
