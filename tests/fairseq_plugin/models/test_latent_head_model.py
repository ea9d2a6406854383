"""What the encoders of this package have in common: the head with two projections, and how checkpoints fit it."""

from __future__ import annotations

import copy
import logging
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fairseq import tasks
from fairseq.models import ARCH_MODEL_REGISTRY

from mlsm_plugin.core.losses.zero_gradients import zero_with_gradient
from mlsm_plugin.fairseq_plugin.compat.model_parts import ATOM_PROJECTION
from mlsm_plugin.fairseq_plugin.models.latent_head_model import LatentHead
from tests.tiny_run import seeded_model, training_config

HEAD = {f"{ATOM_PROJECTION}weight", f"{ATOM_PROJECTION}bias"}


@pytest.fixture(scope="module", params=["mlsm_roberta_tiny", "mlsm_modern_tiny", "mlsm_deberta_tiny"])
def run(pipeline, request):
    cfg = training_config(pipeline.data_bin, arch=request.param)
    return SimpleNamespace(data=pipeline.data_bin, cfg=cfg, task=tasks.setup_task(cfg.task), arch=request.param)


def model_with(run, num_atoms, seed=1):
    """A model with so many atoms, built without asking the data for them."""
    args = copy.deepcopy(run.cfg.model)
    args.num_atoms = num_atoms
    torch.manual_seed(seed)
    return ARCH_MODEL_REGISTRY[run.arch].build_model(args, run.task).eval()


@pytest.fixture
def model(run):
    return model_with(run, 48)


@pytest.fixture
def tokens(run):
    torch.manual_seed(0)
    tokens = torch.randint(5, 800, (3, 12))
    tokens[:, 0] = run.task.source_dictionary.bos()
    tokens[2, 8:] = run.task.source_dictionary.pad()
    return tokens


def test_the_data_says_how_many_atoms_there_are_unless_an_option_does(run):
    head = seeded_model(training_config(run.data, arch=run.arch), run.task).encoder.lm_head
    assert head.atom_projection.weight.shape == (48, 32)
    head = seeded_model(training_config(run.data, "--num-atoms", 9, arch=run.arch), run.task).encoder.lm_head
    assert head.atom_projection.weight.shape == (9, 32)


def test_without_atoms_there_is_no_latent_head(run, tokens):
    cfg = training_config(run.data, task="masked_lm", criterion="masked_lm", arch=run.arch)
    model = seeded_model(cfg, tasks.setup_task(cfg.task))
    assert model.encoder.lm_head.atom_projection is None
    assert not HEAD & set(model.state_dict())
    with pytest.raises(ValueError, match="this model has no atom logits; train it with --task masked_latent"):
        model(tokens, project_atoms=True)


def test_the_transform_of_the_head_feeds_both_projections(model, tokens):
    head = model.encoder.lm_head
    features, _ = model(tokens, features_only=True)
    logits, extra = model(tokens, project_atoms=True)
    transformed = head.layer_norm(head.activation_fn(head.dense(features)))
    torch.testing.assert_close(logits, transformed @ model.encoder.sentence_encoder.embed_tokens.weight.T + head.bias)
    expected = transformed @ head.atom_projection.weight.T + head.atom_projection.bias
    torch.testing.assert_close(extra["atom_logits"], expected)
    extra["atom_logits"].square().sum().backward()
    assert head.dense.weight.grad.any()
    assert head.layer_norm.weight.grad.any()


def test_token_logits_are_those_of_the_stock_head(model, tokens):
    head = model.encoder.lm_head
    features, _ = model(tokens, features_only=True)
    masked = tokens > 400
    assert torch.equal(model(tokens)[0], head(features))
    assert torch.equal(model(tokens, masked_tokens=masked)[0], head(features, masked))


def test_features_only_projects_nothing(run, model, tokens):
    features, extra = model(tokens, features_only=True, project_atoms=True)
    assert features.shape == (3, 12, 32)
    assert extra == {"inner_states": None}
    _, extra = model(tokens, features_only=True, return_all_hiddens=True)
    assert [state.shape for state in extra["inner_states"]] == [(12, 3, 32)] * 3
    if run.arch.startswith("mlsm_roberta"):  # the other one has a norm after the last layer
        assert torch.equal(extra["inner_states"][-1].transpose(0, 1), features)


@pytest.mark.parametrize(
    ("project_tokens", "project_atoms"), [(True, False), (False, True), (True, True), (False, False)]
)
def test_masked_tokens_are_the_selection_of_the_full_projection(model, tokens, project_tokens, project_atoms):
    masked = tokens > 400
    assert 0 < masked.sum() < masked.numel()
    all_logits, all_extra = model(tokens, project_atoms=True)
    logits, extra = model(
        tokens, masked_tokens=masked, project_tokens=project_tokens, project_atoms=project_atoms
    )  # fmt: skip
    assert (logits is not None, "atom_logits" in extra) == (project_tokens, project_atoms)
    if project_tokens:
        torch.testing.assert_close(logits, all_logits[masked])
    if project_atoms:
        torch.testing.assert_close(extra["atom_logits"], all_extra["atom_logits"][masked])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("project_tokens", [True, False])
@pytest.mark.parametrize("project_atoms", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_of_projections_that_are_not_computed_get_a_gradient_of_zeros(
    dtype, project_tokens, project_atoms, tied
):
    embeddings = torch.nn.Parameter(torch.zeros(2000, 8))
    head = LatentHead(8, 2000, "gelu", embeddings if tied else None)
    head.add_atom_projection(5000)
    with torch.no_grad():  # so large that their sum overflows in half precision
        head.bias.fill_(100)
        head.atom_projection.weight.fill_(100)
    head = head.to(dtype)
    zero = zero_with_gradient(head.idle_parameters(project_tokens=project_tokens, project_atoms=project_atoms))
    assert zero.item() == 0
    of_tokens = [head.bias] if tied else [head.bias, head.weight]
    unused = ([] if project_tokens else of_tokens) + ([] if project_atoms else [*head.atom_projection.parameters()])
    if unused:
        zero.backward()
    for parameter in head.parameters():
        expected = any(parameter is other for other in unused)
        assert (parameter.grad is not None) == expected
        assert not expected or torch.equal(parameter.grad, torch.zeros_like(parameter))


def head_messages(caplog):
    return [
        (record.levelname, record.getMessage()) for record in caplog.records if "latent head" in record.getMessage()
    ]


def assert_loaded(model, saved, but=frozenset()):
    loaded = model.state_dict()
    for name in set(loaded) - set(but):
        assert torch.equal(loaded[name], saved[name]), name


@pytest.fixture(autouse=True)
def log_everything(caplog):
    caplog.set_level(logging.INFO)


def test_a_checkpoint_with_the_same_head_loads_whole(run, caplog):
    saved = model_with(run, 48, seed=2).state_dict()
    model = model_with(run, 48)
    model.load_state_dict(copy.deepcopy(saved), strict=True)
    assert_loaded(model, saved)
    assert head_messages(caplog) == []


def test_a_model_without_head_leaves_that_of_the_checkpoint_out(run, caplog):
    saved = model_with(run, 48, seed=2).state_dict()
    model = model_with(run, None)
    model.register_classification_head("sentence_classification_head", num_classes=2)
    model.load_state_dict(copy.deepcopy(saved), strict=True)
    assert_loaded(model, saved, but={name for name in model.state_dict() if name.startswith("classification_heads.")})
    assert head_messages(caplog) == [("INFO", "the checkpoint's latent head is not used by this task and is left out")]


@pytest.mark.parametrize(
    ("saved_atoms", "expected"),
    [
        (None, ("INFO", "the checkpoint has no latent head: a new one is initialized at random")),
        (
            20,
            (
                "WARNING",
                "the checkpoint's latent head has 20 atoms, the codes have 48: a new head is initialized at random",
            ),
        ),
    ],
)
def test_a_head_that_does_not_fit_starts_anew_with_one_line(run, caplog, saved_atoms, expected):
    saved = model_with(run, saved_atoms, seed=2).state_dict()
    model = model_with(run, 48)
    fresh = copy.deepcopy(model.state_dict())
    model.load_state_dict(copy.deepcopy(saved), strict=True)
    assert_loaded(model, saved, but=HEAD)
    assert all(torch.equal(model.state_dict()[name], fresh[name]) for name in HEAD)
    assert head_messages(caplog) == [expected]


def test_the_head_is_fitted_under_a_prefix_too(run, model):
    saved = {f"roberta.{name}": value for name, value in model_with(run, 20, seed=2).state_dict().items()}
    model.upgrade_state_dict_named(saved, "roberta")
    assert torch.equal(saved[f"roberta.{ATOM_PROJECTION}weight"], model.encoder.lm_head.atom_projection.weight)
    assert not HEAD & set(saved)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_model_and_head_can_be_copied_and_pickled(model, tokens, clone):
    expected, expected_extra = model(tokens, project_atoms=True)
    logits, extra = clone(model)(tokens, project_atoms=True)
    assert torch.equal(logits, expected)
    assert torch.equal(extra["atom_logits"], expected_extra["atom_logits"])
    head = clone(model.encoder.lm_head)
    features = torch.ones(2, 32)
    assert torch.equal(head(features), model.encoder.lm_head(features))
    assert torch.equal(
        head.atom_logits(head.transform(features)),
        F.linear(model.encoder.lm_head.transform(features), *model.encoder.lm_head.atom_projection.parameters()),
    )
