"""Learn a sparse coder from any kind of text, measure its health, and write both."""

import json
import os
import pickle
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import atomic_open
from mlsm_plugin.core.files.hf_files import first_line
from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.files.metric_log import MetricLog
from mlsm_plugin.core.files.output_lock import only_writer
from mlsm_plugin.core.files.planned_folder import PlannedFolder, differences
from mlsm_plugin.core.files.recorded_names import without_place
from mlsm_plugin.core.files.settings import check, names_that_decide_nothing, option, seed, undeciding
from mlsm_plugin.core.hidden_states.blocks import TokenBlocks
from mlsm_plugin.core.hidden_states.encoder import HiddenStateEncoder
from mlsm_plugin.core.hidden_states.settings import BlockSettings, ModelRun, layer
from mlsm_plugin.core.hidden_states.stream import HiddenStateStream
from mlsm_plugin.core.machine.devices import has_fast_bf16
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary, learn_dictionary
from mlsm_plugin.core.sparse_coding.encode import normalize_rows
from mlsm_plugin.core.sparse_coding.lasso import LassoCoder
from mlsm_plugin.core.sparse_coding.quality import coder_health
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sae_training import SaeSettings, SaeTrainer, train_sae
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import SparseAutoencoder
from mlsm_plugin.core.sparse_coding.sparse_coder import torch_threads
from mlsm_plugin.version import __version__

HEALTH_TOKENS = 20_000  # on which the health of the dictionary is measured
CHECKPOINT_FILE = "training.pt"
SECONDS_BETWEEN_CHECKPOINTS = 60.0
LASSO = "lasso"
CODERS = (LASSO, "topk", "batchtopk")
# defaults of the options that only one kind of coder has
LASSO_DEFAULTS: dict[str, Any] = {"lambda_": 0.05, "iterations": 1000, "backend": "torch", "batch_size": 400}
SAE_DEFAULTS: dict[str, Any] = {"k": 32, "matryoshka": [], "learning_rate": 3e-3, "batch_size": 256}
METHOD_OF_BACKEND = {
    "spams": "spams.trainDL",
    "torch": "online",
}  # name of each backend in the meta.json of a dictionary


@dataclass(frozen=True)
class LearningSettings(ModelRun):
    """What to learn, and from how much. An option of the chosen coder that is None gets its default.

    ValueError if a value is out of range, or an option belongs to the other kind of coder.
    """

    layer: int = layer()
    coder: str = option(
        LASSO,
        choices=CODERS,
        help="lasso: a dictionary for exact sparse codes; topk, batchtopk: a sparse autoencoder (docs/dictionaries.md)",
    )
    atoms: int = option(3000, least=1, help="number of latent properties")
    tokens: int = option(
        1_000_000,
        least=1,
        help="hidden states to learn from; for an SAE they are not kept, and may be read several times",
    )
    batch_size: int | None = option(None, least=1, help="hidden states in a mini-batch (default: 400; for an SAE: 256)")
    lambda_: float | None = option(None, above=0, help="lasso: weight of the L1 penalty (default: 0.05)")
    iterations: int | None = option(None, least=1, help="lasso: number of mini-batches (default: 1000)")
    backend: str | None = option(
        None,
        choices=tuple(METHOD_OF_BACKEND),
        help="lasso: torch: online learning with the active-set solver; spams: spams.trainDL, on the CPU (default: "
        "torch)",
    )
    k: int | None = option(None, least=1, help="SAE: active latents per token, on average with batchtopk (default: 32)")
    matryoshka: list[int] | None = option(
        None,
        least=1,
        metavar="M",
        help="SAE: ascending sizes of prefixes; for each size M, the first M latents must also reconstruct alone",
    )
    learning_rate: float | None = option(None, above=0, help="SAE: largest learning rate of Adam (default: 0.003)")
    seed: int = seed("of the sample and the first atoms")
    log: MetricLog = undeciding(default_factory=MetricLog)

    def __post_init__(self) -> None:
        check(self)
        if self.coder == LASSO and self.log != MetricLog():
            raise ValueError(f"a log of the training needs coder topk or batchtopk; {LASSO} has no updates to log")
        defaults = LASSO_DEFAULTS if self.coder == LASSO else SAE_DEFAULTS
        for name in (LASSO_DEFAULTS | SAE_DEFAULTS).keys() - defaults.keys():
            if getattr(self, name) is not None:
                owner = " or ".join(coder for coder in CODERS if (coder == LASSO) != (self.coder == LASSO))
                raise ValueError(f"{name} cannot be used with coder {self.coder}; leave it out, or choose {owner}")
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if self.tokens < self.atoms:
            raise ValueError(
                f"tokens is {self.tokens}, fewer than the {self.atoms} atoms that are learned from them; pass more "
                "--tokens, or fewer --atoms"
            )
        if self.coder != LASSO:
            sae_settings(self)  # raises if a value is out of range


def sae_settings(settings: LearningSettings) -> SaeSettings:
    """The settings to train an SAE with; raises ValueError if a value is out of range."""
    kind = {name: cast(Any, getattr(settings, name)) for name in SAE_DEFAULTS}  # the defaults are filled in
    return SaeSettings(
        num_atoms=settings.atoms,
        k=kind["k"],
        updates=max(1, settings.tokens // kind["batch_size"]),
        method=settings.coder,
        prefixes=tuple(kind["matryoshka"]),
        rate=kind["learning_rate"],
        seed=settings.seed,
    )


def learning_plan(
    settings: LearningSettings,
    *,
    auxiliary: str,
    split: str,
    blocks: BlockSettings | None,
    alignment: str | None = None,
) -> JsonObject:
    """Everything that decides the coder, as recorded in ``meta.json``; arguments are those of :func:`learn_into`."""
    lasso = settings.coder == LASSO
    names = ("iterations",) if lasso else ("k", "matryoshka", "learning_rate", "tokens")
    return {
        "layer": settings.layer,
        **({"lambda": settings.lambda_} if lasso else {}),
        "auxiliary_fingerprint": auxiliary,
        **({"blocks": asdict(blocks)} if blocks else {}),
        "fp16": settings.fp16,
        **({"requested_tokens": settings.tokens} if lasso else {}),  # the sample may be smaller
        "n_atoms": settings.atoms,
        "method": METHOD_OF_BACKEND[str(settings.backend)] if lasso else settings.coder,
        **{name: getattr(settings, name) for name in (*names, "batch_size", "seed", "batch_tokens")},
        **({"threads": settings.threads} if settings.threads else {}),
        "split_fingerprint": split,
        **({"alignment_fingerprint": alignment} if alignment else {}),
    }


def learn_into(
    output: Path,
    settings: LearningSettings,
    reader: TokenBlocks,
    open_model: Callable[[], HiddenStateEncoder],
    *,
    auxiliary: str,
    split: str,
    blocks: BlockSettings | None,
    overwrite: bool = False,
    auxiliary_name: str | None = None,
    text_name: str | None = None,
    alignment: str | None = None,
) -> bool:
    """Learn a coder from a text and save it in a folder; False if the folder already holds this coder.

    ValueError if the folder holds another coder or its stopped training (``overwrite`` replaces them), another process
    writes to the folder, or no hidden state uses any atom.

    Args:
        open_model: opens the model; called only if there is something to learn.
        auxiliary, split: fingerprints of the model and of the text.
        blocks: how the text was cut; None if it came in blocks.
        auxiliary_name, text_name: names to record; only the last two parts of a path are.
        alignment: how the model reads a text of another vocabulary, see :func:`alignment_of`; None: its ids.
    """
    plan = learning_plan(settings, auxiliary=auxiliary, split=split, blocks=blocks, alignment=alignment)
    undecided = names_that_decide_nothing(LearningSettings)
    deciding = {name: value for name, value in plan.items() if name not in undecided}
    advice = "Pass --overwrite to `mlsm dictionary`, or delete the folder, or choose another --output"
    with only_writer(output):
        if not overwrite and PlannedFolder(output, deciding, resumable=False, advice=advice).is_complete():
            load_coder(output)  # raises if it is damaged
            return False
        stopped = output / CHECKPOINT_FILE
        if settings.coder == LASSO and not overwrite and stopped.is_file():
            raise ValueError(
                f"{stopped} belongs to a stopped training of a sparse autoencoder. Pass --overwrite to `mlsm "
                "dictionary` or delete the file to discard it, or choose another --output"
            )
        encoder = open_model()
        stream = HiddenStateStream(
            reader,
            encoder,
            batch_size=cast(int, settings.batch_size),  # its default is filled in
            max_batch_tokens=settings.batch_tokens,
            seed=settings.seed,
        )
        coder, health_sample = _learned(settings, plan, stream, output, overwrite=overwrite)
        health = coder_health(health_sample, coder, threads=settings.threads, device=encoder.device)
        if health["unused_atoms"] == coder.num_atoms:
            raise ValueError(f"no hidden state uses any atom, so nothing is written: {coder.why_empty(health_sample)}")
        coder.meta["health"] = health
        coder.meta |= recorded_origin(auxiliary_name, text_name)
        coder.save(output)
        stopped.unlink(missing_ok=True)
        print(
            "{unused_atoms} of {n_atoms} atoms never used by {n_tokens} tokens; {mean_nonzeros:.1f} non-zeros per "
            "token; relative reconstruction error {reconstruction_error:.4f}".format(**health)
        )
    return True


def recorded_origin(auxiliary_name: str | None, text_name: str | None) -> JsonObject:
    """The names of the model and the text, as recorded in ``meta.json``; those that are None are left out."""
    names = {"auxiliary": without_place(auxiliary_name), "text": without_place(text_name)}
    return {key: name for key, name in names.items() if name is not None}


def _learned(
    settings: LearningSettings, plan: JsonObject, stream: HiddenStateStream, output: Path, *, overwrite: bool
) -> tuple[LassoCoder | SaeCoder, np.ndarray]:
    """The learned coder, and normalized hidden states to measure its health on."""
    # the order of the sums depends on the number of threads
    meta = {**plan, "threads": settings.threads or os.cpu_count(), "mlsm_plugin": __version__}
    if settings.coder == LASSO:
        sample = normalize_rows(stream.sample(settings.tokens, device="cpu").numpy())
        print(f"learning {settings.atoms} atoms from {len(sample)} hidden states", flush=True)
        start = time.perf_counter()
        atoms = learn_dictionary(
            sample,
            num_atoms=settings.atoms,
            lambda_=cast(float, settings.lambda_),
            iterations=cast(int, settings.iterations),
            batch_size=stream.batch_size,
            threads=settings.threads,
            seed=settings.seed,
            backend=str(settings.backend),
            device=stream.encoder.device,
        )
        print(f"learned in {time.perf_counter() - start:.1f} s")
        health_sample = sample[:: max(1, len(sample) // HEALTH_TOKENS)][:HEALTH_TOKENS]  # spread evenly
        return LassoCoder(AtomDictionary(atoms, {**meta, "tokens": len(sample)})), health_sample
    print(f"learning {settings.atoms} latents from {settings.tokens} hidden states", flush=True)
    start = time.perf_counter()
    with torch_threads(settings.threads):
        sae = learn_sae(stream, sae_settings(settings), output=output, plan=plan, overwrite=overwrite, log=settings.log)
        print(f"learned in {time.perf_counter() - start:.1f} s")
        health_sample = normalize_rows(stream.sample(HEALTH_TOKENS, device="cpu").numpy())
    return SaeCoder(sae.to("cpu"), meta), health_sample


def learn_sae(
    stream: HiddenStateStream,
    settings: SaeSettings,
    *,
    output: Path,
    plan: JsonObject,
    overwrite: bool = False,
    log: MetricLog | None = None,
) -> SparseAutoencoder:
    """Train on the device of the stream's encoder; the caller removes the checkpoint when the result is saved.

    The state is saved to ``training.pt`` in ``output`` about once a minute. On one thread, a resumed training ends in
    the same bytes as one that never stopped. ``plan`` is everything that decides the result, as JSON values; entries
    that only affect rounding may change when a training resumes. With ``overwrite``, a checkpoint of another plan is
    ignored. ValueError if the checkpoint is damaged or has another plan, or the sample has too few distinct rows.
    """
    path = output / CHECKPOINT_FILE
    device = stream.encoder.device
    # on a GPU, float32 products choose the latents, since they are no bottleneck there
    fast_bf16 = device.type == "cpu" and has_fast_bf16(device)
    state = _checkpoint(path, plan, device, overwrite=overwrite)
    if state is None:
        # larger than the buffer if that may have too few distinct rows
        sample = stream.sample(max(stream.buffer_rows, 2 * settings.num_atoms))
        trainer = SaeTrainer.begin(settings, sample, fast_bf16=fast_bf16)
    else:
        try:
            trainer = SaeTrainer.resume(settings, state, fast_bf16=fast_bf16)
        except ValueError as error:
            raise _damaged(path, error) from None
        print(f"resuming after {trainer.updates} of {settings.updates} updates", flush=True)
    saved = time.monotonic()

    def save() -> None:
        nonlocal saved
        if time.monotonic() - saved >= SECONDS_BETWEEN_CHECKPOINTS and trainer.updates < settings.updates:
            content = {"plan": json.dumps(plan), "state": trainer.state()}
            with atomic_open(path) as file:
                torch.save(content, file)
            saved = time.monotonic()

    # closed even after an error or Ctrl-C, so that the stream's thread ends
    batches = closing(stream.batches(trainer.updates, settings.updates))
    with batches as rows, (log or MetricLog()).opened() as write:
        return train_sae(trainer, rows, after_update=save, log=write)


def _checkpoint(path: Path, plan: JsonObject, device: torch.device, *, overwrite: bool) -> dict[str, Tensor] | None:
    """The state in a checkpoint of this plan; None to start anew."""
    if not path.is_file():
        return None
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        recorded = json.loads(content["plan"])
        state = content["state"]
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise ValueError("its state does not consist of tensors")
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
        if overwrite:
            return None
        raise _damaged(path, error) from None
    requested = json.loads(json.dumps(plan))
    if isinstance(recorded, dict):
        undecided = names_that_decide_nothing(LearningSettings)
        recorded = {name: requested[name] if name in undecided else recorded.get(name) for name in requested}
    changes = differences(recorded, requested)
    if changes and not overwrite:
        raise ValueError(
            f"{path} belongs to a training that was begun with other settings: {'; '.join(changes[:4])}. "
            "Pass --overwrite to `mlsm dictionary` or delete the file to start anew, or pass the settings that it was "
            "begun with"
        )
    return None if changes else state


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is not a checkpoint of this training ({first_line(error)}); delete it to start anew")
