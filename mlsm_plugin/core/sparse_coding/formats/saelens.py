"""SAEs of SAELens, read and written: ``cfg.json`` and ``sae_weights.safetensors``
(https://github.com/decoderesearch/SAELens).

Since version 6, SAELens keeps the architecture and its parameters at the top of ``cfg.json``, and the model and hook
under ``metadata``. Older files are flat, and some hold the settings of the whole training run.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_open, write_json
from mlsm_plugin.core.files.hf_files import HF_PREFIX
from mlsm_plugin.core.files.json_checks import JsonObject, anything, number, optional, text, whole
from mlsm_plugin.core.sparse_coding.formats.foreign_files import (
    ConfigFile,
    TensorFile,
    check_safetensors,
    imported_sae,
    one_of,
    read_safetensors,
    yes_or_no,
)
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import SaeConfig
from mlsm_plugin.core.sparse_coding.sparse_coder import SparseCoder
from mlsm_plugin.version import __version__

NAME = "saelens"
CONFIG_FILE = "cfg.json"
WEIGHTS_FILE = "sae_weights.safetensors"
FIRST_WITH_METADATA = 6  # version of SAELens
SCALER_FILE = "activation_scaler.json"  # part of a checkpoint written during training
TOPK = "topk"
WITH_A_GLOBAL_THRESHOLD = ("batchtopk", "matryoshka_batchtopk")
# architecture -> our activation
ARCHITECTURES = {
    "standard": "relu",
    TOPK: "topk",
    "jumprelu": "jumprelu",
    "gated": "gated",
    **dict.fromkeys(WITH_A_GLOBAL_THRESHOLD, "jumprelu"),
}
TRANSCODER = "a transcoder predicts the output of another place in the model, and does not reconstruct its input"
REFUSED = {
    **dict.fromkeys(("transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder"), TRANSCODER),
    "abstopk": "its latents can be negative, and codes are not",
    "temporal": "its latents depend on other tokens",
    "matching_pursuit": "its latents come from an iteration, not from an encoder",
}
# normalize_activations -> our input norm; the factor of expected_average_only_in is folded into the weights
INPUT_NORMS = {
    "none": "none",
    "expected_average_only_in": "none",
    "constant_norm_rescale": "constant_norm",
    "layer_norm": "layer_norm",
}
OLDER_NAMES = {
    "hook_point": "hook_name",
    "hook_point_layer": "hook_layer",
    "hook_point_head_index": "hook_head_index",
    "activation_fn_str": "activation_fn",
}
# kept in meta.json under imported_from
FACTS = (
    "model_name",
    "model_class_name",
    "model_from_pretrained_kwargs",
    "hook_name",
    "hook_layer",
    "hook_head_index",
    "hf_hook_name",
    "context_size",
    "prepend_bos",
    "exclude_special_tokens",
    "seqpos_slice",
    "dataset_path",
    "neuronpedia_id",
    "sae_lens_version",
    "sae_lens_training_version",
    "training_architecture",
)
# Settings of training, the text or the machine. They do not change the latents of an input.
TRAINING = """
device dtype dataset_trust_remote_code
decoder_init_norm l1_coefficient lp_norm l1_warm_up_steps jumprelu_init_threshold jumprelu_bandwidth
jumprelu_sparsity_loss_mode jumprelu_tanh_scale jumprelu_ste_to_input l0_coefficient l0_warm_up_steps
pre_act_loss_coefficient target_l0 use_sparse_activations aux_loss_coefficient topk_threshold_lr matryoshka_widths
use_matryoshka_aux_loss
use_ghost_grads normalize_sae_decoder noise_scale decoder_orthogonal_init decoder_heuristic_init
init_encoder_as_decoder_transpose mse_loss_normalization scale_sparsity_penalty_by_decoder_norm b_dec_init_method
b_dec_init_method_norm expansion_factor from_pretrained_path finetuning_method finetuning_tokens
hook_eval hook_point_eval hook_point_template streaming is_dataset_tokenized use_cached_activations
cached_activations_path new_cached_activations_path n_batches_in_buffer training_tokens total_training_tokens
store_batch_size store_batch_size_prompts train_batch_size train_batch_size_tokens act_store_device seed
autocast autocast_lm compile_llm llm_compilation_mode compile_sae sae_compilation_mode llm_device
adam_beta1 adam_beta2 lr lr_scheduler_name lr_warm_up_steps lr_end lr_decay_steps n_restart_cycles
feature_sampling_method feature_sampling_window feature_reinit_scale resample_batches dead_feature_window
dead_feature_estimation_method dead_feature_threshold n_eval_batches eval_batch_size_prompts
log_to_wandb log_activations_store_to_wandb log_optimizer_state_to_wandb wandb_project wandb_id run_name
wandb_entity wandb_log_frequency eval_every_n_wandb_logs logger resume resume_from_checkpoint n_checkpoints
checkpoint_path output_path save_final_checkpoint verbose model_kwargs tokens_per_buffer
sequence_separator_token disable_concat_sequences activations_mixing_fraction prefetch_llm_batches
use_chat_formatting n_batches_for_norm_estimate
"""
WITHOUT_EFFECT = frozenset(TRAINING.split())
TENSORS = {"encoder": "W_enc", "decoder": "W_dec", "decoder_bias": "b_dec"}
GATED_TENSORS = {"encoder_bias": "b_gate", "gate_scale": "r_mag", "gate_bias": "b_mag"}
# for export: our activation -> architecture, our input norm -> normalize_activations
EXPORTED_ARCHITECTURES = {"relu": "standard", "topk": "topk", "jumprelu": "jumprelu", "gated": "gated"}
EXPORTED_NORMS = {"none": "none", "constant_norm": "constant_norm_rescale", "layer_norm": "layer_norm"}
ORIGIN = ("model_name", "hook_name", "dataset_path")  # of metadata; what tools ask for
FORMAT_VERSION = "6.0.0"  # the SAELens that first read these files


def read_saelens(folder: PathLike) -> SaeCoder:
    """Read an SAE; its latents and reconstructions equal those of ``sae_lens.SAE.load_from_disk``, in float32.

    A BatchTopK SAE in the training format becomes a JumpReLU SAE with one threshold, as in SAELens when training ends.
    ValueError if a file is missing or damaged, or this kind of SAE cannot be converted (says why).
    """
    folder = Path(folder)
    settings = ConfigFile.read(folder / CONFIG_FILE)
    facts, flat = _facts(settings)
    architecture, k = _architecture(settings, flat)
    subtract = settings.take("apply_b_dec_to_input", yes_or_no, True)
    norm = _input_norm(settings, flat)
    _check_shape_of_input(settings, flat, facts)
    config = SaeConfig(ARCHITECTURES[architecture], k, subtract, norm, _rescale(settings, architecture))
    shape = settings.take("d_sae", whole(1)), settings.take("d_in", whole(1))
    settings.finish(WITHOUT_EFFECT | (set() if flat else set(FACTS)))
    _check_nothing_is_left_to_fold(folder / SCALER_FILE)

    file = read_safetensors(folder / WEIGHTS_FILE)
    _check_scaling(file)
    weights = file.weights({**TENSORS, **(GATED_TENSORS if architecture == "gated" else {"encoder_bias": "b_enc"})})
    if config.activation == "jumprelu":
        weights = weights._replace(threshold=_threshold(file, architecture, weights.encoder_bias))
    file.finish()
    return imported_sae(file, config, weights, shape, {"format": NAME, "architecture": architecture, **facts})


def _facts(settings: ConfigFile) -> tuple[JsonObject, bool]:
    """The facts about the origin, and whether the file is flat; very old files have no version."""
    metadata = settings.part("metadata")
    facts = {**settings.facts(("sae_lens_version",)), **metadata.facts((*FACTS, "hook_name_out"))}
    version = facts.get("sae_lens_version")
    major = None if version is None else re.match(r"\d+", str(version))
    if version is not None and major is None:
        raise ValueError(f"{settings.path}: sae_lens_version: {str(version)[:40]!r} is not a version")
    flat = major is None or int(major[0]) < FIRST_WITH_METADATA
    if flat:
        for old, new in OLDER_NAMES.items():
            settings.rename(old, new)
        facts |= settings.facts(FACTS)
    if facts.pop("hook_name_out", None) not in (None, facts.get("hook_name")):
        raise ValueError(f"{settings.path}: hook_name_out: {TRANSCODER}")
    return facts, flat


def _architecture(file: ConfigFile, flat: bool) -> tuple[str, int | None]:
    """The architecture, and k of ``topk``."""
    architecture = file.take("architecture", text, "standard" if flat else ...)
    if architecture in REFUSED:
        raise ValueError(f"{file.path}: an SAE of the architecture {architecture} is refused: {REFUSED[architecture]}")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{file.path}: the architecture {architecture[:40]!r} is unknown; known are {known}")
    old_k = None
    if flat:  # topk was an activation before it was an architecture
        activation = file.take("activation_fn", optional(one_of("relu", TOPK)), "relu") or "relu"
        options = file.part("activation_fn_kwargs")
        if activation == TOPK and architecture not in ("standard", TOPK):
            raise ValueError(f"{file.path}: the activation topk does not belong to the architecture {architecture}")
        architecture = TOPK if activation == TOPK else architecture
        if architecture == TOPK:
            old_k = options.take("k", whole(1), None)
        options.finish()
    if architecture == TOPK:
        k = file.take("k", whole(1), ... if old_k is None else old_k)
        if old_k not in (None, k):
            raise ValueError(f"{file.path}: k is {k}, but {old_k} in activation_fn_kwargs")
        return architecture, k
    if architecture in WITH_A_GLOBAL_THRESHOLD:
        file.take("k", _positive, None)  # the mean number of latents; the threshold decides
    return architecture, None


def _positive(value: Any) -> str | None:
    return number(value) or (None if value > 0 else f"{value} is not above 0")


def _input_norm(file: ConfigFile, flat: bool) -> str:
    name = file.take("normalize_activations", anything, "none")
    if flat and (name is None or isinstance(name, bool)):
        name = "expected_average_only_in" if name else "none"
    if name == "covariance_whitening":
        raise ValueError(
            f"{file.path}: normalize_activations: the whitening is not part of these weights; save the SAE with "
            "save_inference_model of SAELens after its training has ended, which folds it into them"
        )
    if not isinstance(name, str) or name not in INPUT_NORMS:
        raise ValueError(f"{file.path}: normalize_activations: {one_of(*INPUT_NORMS)(name)}")
    return INPUT_NORMS[name]


def _check_shape_of_input(file: ConfigFile, flat: bool, facts: JsonObject) -> None:
    """Raise ValueError if the SAE's input or output is not a plain hidden state."""
    of_heads = flat and "hook_z" in str(facts.get("hook_name"))
    reshaping = file.take("reshape_activations", optional(text), "hook_z" if of_heads else "none") or "none"
    if reshaping != "none":
        raise ValueError(
            f"{file.path}: reshape_activations: {reshaping[:40]!r} is refused: such an SAE reads the outputs of "
            "attention heads, which are no hidden states"
        )
    if file.take("finetuning_scaling_factor", optional(yes_or_no), False):
        raise ValueError(
            f"{file.path}: finetuning_scaling_factor is refused: with it, the decoded latents differ from the encoded "
            "ones"
        )


def _rescale(file: ConfigFile, architecture: str) -> bool:
    """Whether pre-activations are multiplied by the norms of the decoder."""
    name = "rescale_acts_by_decoder_norm"
    if architecture in WITH_A_GLOBAL_THRESHOLD:  # versions of SAELens differ in the default
        return bool(file.take(name, yes_or_no))
    if architecture == TOPK:
        return bool(file.take(name, yes_or_no, False))
    return bool(file.take(name, one_of(False), False))


def _check_nothing_is_left_to_fold(path: Path) -> None:
    """Raise ValueError for a training checkpoint whose inputs were scaled by a factor that is not in its weights."""
    if not path.exists():
        return
    file = ConfigFile.read(path)
    if file.take("scaling_factor", default=None) is not None or file.take("has_whitening", default=False):
        raise ValueError(
            f"{path}: the inputs were scaled during training, and the weights of this checkpoint do not contain it; "
            "convert the SAE that SAELens saved at the end of training"
        )


def _threshold(file: TensorFile, architecture: str, like: Tensor) -> Tensor:
    if architecture in WITH_A_GLOBAL_THRESHOLD:
        if "topk_threshold" in file:
            return torch.full_like(like, file.number("topk_threshold"))
        if "threshold" not in file:
            raise ValueError(
                f"{file.path} has neither topk_threshold nor threshold: without a threshold, the latents of a "
                "BatchTopK SAE depend on the other tokens of a batch"
            )
    if "log_threshold" in file:  # checkpoints of training before SAELens 6
        return file.take("log_threshold").exp()
    return file.take("threshold")


def _check_scaling(file: TensorFile) -> None:
    """Raise ValueError unless the latents' factors in older files are 1; they are not after fine-tuning."""
    for name in ("scaling_factor", "finetuning_scaling_factor"):
        if name in file:
            factor = file.take(name)
            if not torch.allclose(factor, torch.ones_like(factor)):
                raise ValueError(f"{file.path}: {name} is not 1, which is refused: latents would be decoded scaled")


def check_exportable(kind: type[SparseCoder]) -> None:
    """Raise ValueError if coders of this kind cannot be written, or the package ``safetensors`` is missing."""
    if not issubclass(kind, SaeCoder):
        raise ValueError(
            f"a coder of kind {kind.kind!r} cannot be written for SAELens, which holds sparse autoencoders: it has no "
            "encoder"
        )
    check_safetensors()


def for_saelens(coder: SaeCoder) -> SaeCoder:
    """The same SAE in the form that :func:`write_saelens` writes: rescaling is folded into the weights."""
    if not coder.sae.config.rescale_by_decoder_norm:
        return coder
    return SaeCoder(coder.sae.with_unit_decoder(coder.sae.decoder_norms), coder.meta)


def write_saelens(coder: SaeCoder, folder: PathLike) -> None:
    """Write the result of :func:`for_saelens`, on the CPU, to an existing folder; call :func:`check_exportable` first.

    ``cfg.json`` comes last; without it, SAELens does not load the folder. ``sae_lens.SAE.load_from_disk`` gives the
    same latents and reconstructions, except NaN for a hidden state of zeros under ``constant_norm``.
    """
    from safetensors.torch import save

    folder = Path(folder)
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    config = coder.sae.config
    weights = coder.sae.weights
    named: dict[str, Tensor | None] = {"W_enc": weights.encoder.T, "W_dec": weights.decoder}
    named["b_dec"] = weights.decoder_bias
    named["b_gate" if config.activation == "gated" else "b_enc"] = weights.encoder_bias
    named |= {"threshold": weights.threshold, "r_mag": weights.gate_scale, "b_mag": weights.gate_bias}
    content = save({name: tensor.contiguous() for name, tensor in named.items() if tensor is not None})
    with atomic_open(folder / WEIGHTS_FILE) as file:
        file.write(content)
    write_json(folder / CONFIG_FILE, _configuration(coder))


def facts_of(coder: SaeCoder) -> JsonObject:
    """What the exported ``cfg.json`` says of the origin: names of model, hook and dataset, if they are recorded.

    What SAELens said of an imported SAE takes precedence. The hook is named after the output of ``transformers`` that
    holds the hidden states: ``hidden_states.5`` for layer 5.
    """
    imported = coder.meta.get("imported_from")
    facts = imported if isinstance(imported, dict) and imported.get("format") == NAME else {}
    model = coder.meta.get("auxiliary")
    layer = coder.meta.get("layer")
    recorded = {
        "model_name": None if model is None else model.removeprefix(HF_PREFIX),
        "hook_name": None if layer is None else f"hidden_states.{layer}",
        "dataset_path": coder.meta.get("text"),
    }
    lacking = {name: value for name, value in recorded.items() if value is not None and facts.get(name) is None}
    return {**{name: facts[name] for name in FACTS if name in facts}, **lacking}


def _configuration(coder: SaeCoder) -> JsonObject:
    config = coder.sae.config
    facts = facts_of(coder)
    origin = {name: coder.meta.get(name) for name in ("layer", "auxiliary_fingerprint")}
    return {
        "architecture": EXPORTED_ARCHITECTURES[config.activation],
        "d_in": coder.dim,
        "d_sae": coder.num_atoms,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": config.subtract_decoder_bias,
        "normalize_activations": EXPORTED_NORMS[config.input_norm],
        "reshape_activations": "none",
        **({} if config.k is None else {"k": config.k, "rescale_acts_by_decoder_norm": False}),
        "metadata": {
            **facts,
            "sae_lens_version": FORMAT_VERSION,
            "sae_lens_training_version": facts.get("sae_lens_training_version"),
            "mlsm_plugin": {"version": __version__, **origin},
        },
    }
