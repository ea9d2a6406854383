"""The modern encoder, and DeBERTa's, through all objectives and what comes before and after, in bfloat16, with Muon."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from mlsm_plugin import hub
from mlsm_plugin.evaluation.minimal_pairs import pseudo_log_likelihoods
from tests.conftest import TINY_MODEL, Pipeline, fairseq_train, logged, mlsm
from tests.runs.training_runs import (
    Run,
    assert_same_updates,
    fine_tuned,
    save_dir_of,
    text_of,
    train_on_two_ranks,
    two_at_a_time,
    updates_in,
    updates_of_a_stopped_run,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_python")]

MODERN = ("--arch", "mlsm_modern_tiny", "--optimizer", "muon", "--decay-matrices-only", "--weight-decay", 0.1)
DEBERTA = ("--arch", "mlsm_deberta_tiny")
PLAIN = ("--task", "plain_masked_lm", "--criterion", "masked_lm")
BF16 = ("--autocast", "bf16")
NPM = ("--task", "nonparametric_masked_lm", "--criterion", "span_contrastive", "--group-size", 8, "--batch-size", 2)


@pytest.fixture(scope="module")
def runs(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Run]]]:
    """Runs that do not depend on each other, two at a time; a test waits for those that it looks at."""
    root = tmp_path_factory.mktemp("modern")
    mlsm_and_mlm = ("--mlm-weight", 1, "--max-update", 12)
    train = partial(fairseq_train, pipeline.data_bin, root, *MODERN)
    plain = partial(train, *PLAIN, "--max-update", 6, task="plain_masked_lm")
    npm = partial(train, *NPM, "--max-update", 4, task="nonparametric_masked_lm")
    calls = {
        "mlsm": partial(train, *mlsm_and_mlm, *BF16, "--save-dir", root / "mlsm"),
        "mlsm in float32": partial(train, *mlsm_and_mlm, "--no-save"),
        "latent only": partial(train, "--max-update", 4, "--no-save", *BF16),
        "plain": partial(plain, *BF16, "--save-dir", root / "plain"),
        "plain in float32": partial(plain, "--no-save"),
        "taco": partial(train, "--max-update", 4, *BF16, "--save-dir", root / "taco", task="taco"),
        "npm": partial(npm, *BF16, "--save-dir", root / "npm"),
    }
    for name in ("mlsm", "plain", "taco", "npm"):
        calls[f"deberta: {name}"] = partial(calls[name], *DEBERTA, "--save-dir", root / f"deberta-{name}")
    with two_at_a_time(calls) as started:
        yield started


def model_of(runs: dict[str, Future[Run]], name: str) -> Path:
    return save_dir_of(runs[name].result())


def test_a_log_has_no_warnings_that_its_reader_cannot_heed(runs: dict[str, Future[Run]]) -> None:
    result = runs["plain"].result()
    log = result.stdout + result.stderr
    assert "Warning" not in log
    shared = [line.partition("parameter: ")[2] for line in log.splitlines() if "detected shared parameter" in line]
    assert shared == ["encoder.sentence_encoder.embed_tokens.weight <- encoder.lm_head.weight"]


OF_DEBERTA = [f"deberta: {name}" for name in ("mlsm", "plain", "taco", "npm")]


@pytest.mark.parametrize("name", ["mlsm", "latent only", "plain", "taco", "npm", *OF_DEBERTA])
def test_every_objective_trains_and_validates(runs: dict[str, Future[Run]], name: str) -> None:
    losses = [float(value) for value in logged(runs[name].result(), "loss")]
    assert len(losses) >= 4
    assert all(map(math.isfinite, losses))
    # these codes hold little that a few updates can learn; the demo shows that it learns. The four batches of NPM
    # differ by more than it learns from them.
    if name not in ("latent only", "deberta: npm"):
        part = max(1, len(losses) // 3)  # the batches differ
        assert sum(losses[-part:]) < sum(losses[:part])
    assert float(logged(runs[name].result(), "loss", where="valid")[0]) > 0


@pytest.mark.parametrize("name", ["mlsm", "plain"])
def test_bfloat16_begins_as_float32_does(runs: dict[str, Future[Run]], name: str) -> None:
    for where in ("train_inner", "valid"):
        rounded, exact = (
            float(logged(runs[which].result(), "loss", where=where)[0]) for which in (name, f"{name} in float32")
        )
        assert rounded == pytest.approx(exact, rel=0.01)
    assert logged(runs[name].result(), "gnorm") != logged(runs[f"{name} in float32"].result(), "gnorm")


def test_resumed_run_equals_one_that_never_stopped(
    runs: dict[str, Future[Run]], pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = (pipeline.data_bin, tmp_path / "stopped", *PLAIN, *BF16, *MODERN)
    assert updates_of_a_stopped_run(*words, task="plain_masked_lm") == updates_in(text_of(runs["plain"].result()))
    states = [torch.load(folder / "checkpoint_last.pt") for folder in (model_of(runs, "plain"), tmp_path / "stopped")]
    for name, value in states[0]["model"].items():
        assert torch.equal(states[1]["model"][name], value), name


@pytest.mark.parametrize("task_flags", [PLAIN, ("--mlm-weight", 1)], ids=["plain", "mlsm"])
def test_two_ranks_compute_what_one_rank_computes_from_both_their_batches(
    pipeline: Pipeline, tmp_path: Path, task_flags: tuple[object, ...]
) -> None:
    flags = (*task_flags, *MODERN, "--max-update", 3, "--clip-norm", 1.0, "--no-save")
    ranks = train_on_two_ranks(pipeline.data_bin, tmp_path / "two", "--ddp-backend", "legacy_ddp", *flags)
    alone = fairseq_train(pipeline.data_bin, tmp_path / "one", "--update-freq", 2, *flags)
    for rank in ranks:
        assert rank.returncode == 0, rank.stdout[-4000:]
    assert_same_updates(updates_in(ranks[0].stdout), updates_in(text_of(alone)), 3)


@pytest.mark.parametrize("name", ["mlsm", "deberta: mlsm"])
def test_trained_model_fills_masks_names_properties_and_scores_sentences(
    runs: dict[str, Future[Run]], name: str
) -> None:
    model = hub.from_pretrained(model_of(runs, name))
    assert model.num_atoms == 48
    assert len(model.fill_mask("The <mask> is executed.", topk=3)) == 3
    assert [len(token.atoms) for token in model.latent_properties("a <mask> here", topk=3)].count(3) >= 3
    sentences = "The name is bound.", "The name is bound is bound."
    better, worse = pseudo_log_likelihoods(model, [model.encode(text) for text in sentences])
    assert better > worse


def test_trained_model_is_fine_tuned_and_classifies_from_the_hub(
    runs: dict[str, Future[Run]], pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.runs.training_runs.TINY_MODEL", (*TINY_MODEL, *MODERN[:2]))
    output, classifier = fine_tuned(model_of(runs, "mlsm") / "checkpoint_last.pt", pipeline, tmp_path)
    assert output.count("the checkpoint's latent head is not used by this task and is left out") == 1
    assert classifier.num_atoms == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [("plain", "ModernBertForSequenceClassification"), ("deberta: plain", "DebertaV2ForSequenceClassification")],
)
def test_mlsm_finetune_keeps_the_architecture(
    runs: dict[str, Future[Run]], pipeline: Pipeline, tmp_path: Path, name: str, kind: str
) -> None:
    lines = [line for line in pipeline.train_text.read_text(encoding="utf-8").splitlines() if 20 < len(line) < 90]
    for split, chosen in (("train", lines[:64]), ("valid", lines[64:96])):
        rows = [f"{'long' if len(line) > 55 else 'short'}\t{line}\n" for line in chosen]
        (tmp_path / f"{split}.tsv").write_text("".join(rows), encoding="utf-8")
    texts = ("--train", tmp_path / "train.tsv", "--valid", tmp_path / "valid.tsv")
    mlsm("finetune", "--model", model_of(runs, name), *texts, "--output", tmp_path / "out", "--max-epoch", 1,
         "--batch-size", 16, "--cpu")  # fmt: skip
    classify = transformers.pipeline("text-classification", str(tmp_path / "out" / "model"))
    assert type(classify.model).__name__ == kind
    assert classify("A name.")[0]["label"] in ("long", "short")


@pytest.mark.parametrize("name", ["npm", "deberta: npm"])
def test_phrases_of_a_modern_npm_are_stored_and_fill_masks(
    runs: dict[str, Future[Run]], pipeline: Pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    checkpoint = ("--checkpoint", model_of(runs, name) / "checkpoint_last.pt")
    mlsm("npm", "datastore", pipeline.data_bin, *checkpoint, "--output", tmp_path / "store", "--splits", "valid")
    capsys.readouterr()
    mlsm("npm", "fill", *checkpoint, "--datastore", tmp_path / "store", "--topk", 2, "The <mask> is executed.")
    assert len(capsys.readouterr().out.splitlines()) >= 2


@pytest.mark.parametrize("name", ["plain", "deberta: plain"])
def test_modern_auxiliary_is_coded_and_its_codes_are_learned(
    runs: dict[str, Future[Run]], pipeline: Pipeline, tmp_path: Path, name: str
) -> None:
    auxiliary, data = model_of(runs, name) / "checkpoint_last.pt", tmp_path / "data-bin"
    mlsm("binarize", "--tokenizer", pipeline.tokenizer, "--train", pipeline.valid_text, "--valid", pipeline.valid_text,
         "--output", data)  # fmt: skip
    for layer in (1, 2):
        folder, model = tmp_path / f"dictionary-{layer}", ("--auxiliary", auxiliary)
        mlsm("dictionary", data, *model, "--layer", layer, "--output", folder, "--atoms", 20, "--tokens", 500,
             "--iterations", 5, "--tokens-per-sample", 64)  # fmt: skip
    mlsm("encode", data, *model, "--dictionary", folder, "--tokens-per-sample", 64)
    flags = ("--max-update", 2, "--no-save", *MODERN)
    run = fairseq_train(data, tmp_path / "model", *flags)
    assert len(logged(run, "kl")) == 2


def test_npm_starts_from_a_masked_lm(runs: dict[str, Future[Run]], pipeline: Pipeline, tmp_path: Path) -> None:
    start = ("--finetune-from-model", model_of(runs, "plain") / "checkpoint_last.pt")
    run = fairseq_train(
        pipeline.data_bin, tmp_path / "npm", *NPM, *MODERN, *start, "--max-update", 1, "--no-save",
        task="nonparametric_masked_lm",
    )  # fmt: skip
    assert "2 symbols are new, and start as copies of <mask>" in text_of(run)
