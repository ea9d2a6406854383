"""Learn a sparse coder from a text, judge it, and write it with its health; one way for every kind of text."""

from __future__ import annotations

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

from mlsm_plugin.files.atomic_files import write_file
from mlsm_plugin.files.output_lock import only_writer
from mlsm_plugin.files.planned_folder import PlannedFolder, Standing, differences
from mlsm_plugin.hidden_states.blocks import BlockSettings, TokenBlocks
from mlsm_plugin.hidden_states.devices import has_fast_bf16
from mlsm_plugin.hidden_states.encoder import TokenVectors
from mlsm_plugin.hidden_states.stream import HiddenStateStream
from mlsm_plugin.sparse_coding.coder import load_coder
from mlsm_plugin.sparse_coding.dictionary import Dictionary, learn_dictionary
from mlsm_plugin.sparse_coding.encode import normalize_rows
from mlsm_plugin.sparse_coding.lasso import LassoCoder
from mlsm_plugin.sparse_coding.quality import coder_health
from mlsm_plugin.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.sparse_coding.sae_training import SaeSettings, SaeTrainer, train_sae
from mlsm_plugin.sparse_coding.sparse_autoencoder import SparseAutoencoder
from mlsm_plugin.sparse_coding.sparse_coder import torch_threads
from mlsm_plugin.version import __version__

# number of tokens on which the health of the dictionary is measured
HEALTH_TOKENS = 20_000
CHECKPOINT_FILE = "training.pt"
SECONDS_BETWEEN_CHECKPOINTS = 60.0
# parts of a plan that decide only how sums are rounded: the training of an SAE resumes with other ones
NEUTRAL = ("threads", "batch_tokens")
LASSO = "lasso"
CODERS = (LASSO, "topk", "batchtopk")
# options that only one kind of coder has, and the defaults of each kind
LASSO_DEFAULTS: dict[str, Any] = {"lambda_": 0.05, "iterations": 1000, "backend": "torch"}
SAE_DEFAULTS: dict[str, Any] = {"k": 32, "matryoshka": [], "learning_rate": 3e-3}
# what the meta.json of a dictionary calls each backend
METHODS = {"spams": "spams.trainDL", "torch": "online"}
BATCH_SIZES = {LASSO: 400, "topk": 256, "batchtopk": 256}
POSITIVE = ("atoms", "lambda_", "tokens", "iterations", "batch_size", "threads", "batch_tokens", "k", "learning_rate")


@dataclass
class LearningSettings:
    """What is learned, and from how much; None stands for the default of the kind of coder.

    Attributes:
        layer: hidden state to learn from: 0 is the embeddings, 1 the first layer, ...
        coder: ``lasso`` for a dictionary, ``topk`` or ``batchtopk`` for a sparse autoencoder.
        atoms: number of latent properties.
        tokens: number of hidden states to learn from.
        batch_size: hidden states in a mini-batch (400, of an autoencoder 256).
        lambda_, iterations, backend: of a dictionary: weight of the L1 penalty (0.05), number of mini-batches (1000),
            and ``torch`` (default) or ``spams``.
        k, matryoshka, learning_rate: of an autoencoder: active latents of a token (32), sizes of prefixes that also
            have to reconstruct alone (none), and largest learning rate (0.003).
        seed: of the sample and the first atoms.
        fp16: run the model in half precision.
        threads: CPU threads, None for all cores.
        batch_tokens: tokens in one forward pass.

    Raises:
        ValueError: a value is out of range, or an option belongs to the other kind of coder.
    """

    layer: int
    coder: str = LASSO
    atoms: int = 3000
    tokens: int = 1_000_000
    batch_size: int | None = None
    lambda_: float | None = None
    iterations: int | None = None
    backend: str | None = None
    k: int | None = None
    matryoshka: list[int] | None = None
    learning_rate: float | None = None
    seed: int = 1
    fp16: bool = False
    threads: int | None = None
    batch_tokens: int = 8192

    def __post_init__(self) -> None:
        if self.coder not in CODERS:
            raise ValueError(f"--coder must be one of {', '.join(CODERS)}, got {self.coder!r}")
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{_option(name)} must be positive, got {value}")
        choose_defaults(self)
        if self.coder != LASSO:
            sae_settings(self)  # raises if a value is out of range
        if self.seed < 0:
            raise ValueError(f"--seed must not be negative, got {self.seed}")


def choose_defaults(args: Any) -> None:
    """Set the options that were not given to the defaults of the kind of coder.

    Args:
        args: has an attribute for each option, such as :class:`LearningSettings`.

    Raises:
        ValueError: an option belongs to the other kind.
    """
    own, other = (LASSO_DEFAULTS, SAE_DEFAULTS) if args.coder == LASSO else (SAE_DEFAULTS, LASSO_DEFAULTS)
    for name in other:
        if getattr(args, name, None) is not None:
            owner = " or ".join(coder for coder in CODERS if (coder == LASSO) != (args.coder == LASSO))
            raise ValueError(
                f"{_option(name)} does not go with --coder {args.coder}; leave it out, or pass --coder {owner}"
            )
    for name, default in {**own, "batch_size": BATCH_SIZES[args.coder]}.items():
        if getattr(args, name, None) is None:
            setattr(args, name, default)


def _option(name: str) -> str:
    return "--" + name.strip("_").replace("_", "-")


def sae_settings(args: Any) -> SaeSettings:
    """What the options of an SAE ask for.

    Raises:
        ValueError: a value is out of range.
    """
    return SaeSettings(
        num_atoms=args.atoms,
        k=args.k,
        updates=max(1, args.tokens // args.batch_size),
        method=args.coder,
        prefixes=tuple(args.matryoshka),
        rate=args.learning_rate,
        seed=args.seed,
    )


def learning_plan(
    settings: LearningSettings, *, auxiliary: str, split: str, blocks: BlockSettings | None
) -> dict[str, Any]:
    """What decides the coder, as ``meta.json`` will have it.

    Args:
        settings: what is learned.
        auxiliary: fingerprint of the model.
        split: fingerprint of the text.
        blocks: how the text was cut; None if it consists of blocks.
    """
    plan: dict[str, Any] = {
        "layer": settings.layer,
        **({"lambda": settings.lambda_} if settings.coder == LASSO else {}),
        "auxiliary_fingerprint": auxiliary,
        **({"blocks": asdict(blocks)} if blocks else {}),
        "fp16": settings.fp16,
    }
    names = ["batch_size", "seed", "batch_tokens"]
    if settings.coder == LASSO:
        names = ["iterations", *names]
        plan["requested_tokens"] = settings.tokens  # the sample may be smaller
        method = METHODS[str(settings.backend)]
    else:
        names = ["k", "matryoshka", "learning_rate", "tokens", *names]
        method = settings.coder
    plan |= {"n_atoms": settings.atoms, "method": method}
    plan |= {name: getattr(settings, name) for name in names}
    plan |= {"threads": settings.threads} if settings.threads else {}
    return {**plan, "split_fingerprint": split}


def learn_into(
    output: Path,
    settings: LearningSettings,
    plan: dict[str, Any],
    reader: TokenBlocks,
    open_encoder: Callable[[], TokenVectors],
    *,
    overwrite: bool = False,
) -> bool:
    """Learn a coder and save it, unless it is already there.

    Args:
        output: the folder.
        settings: what is learned.
        plan: of :func:`learning_plan`.
        reader: the text.
        open_encoder: opens the model; called only if there is something to learn.
        overwrite: replace another coder that is already there.

    Returns:
        whether something was learned; False: this very coder is there.

    Raises:
        ValueError: another coder or its stopped training is there, another process writes to the folder, or no
            hidden state uses any atom.
    """
    with only_writer(output):
        if not overwrite and _is_complete(output, plan):
            return False
        if settings.coder == LASSO and not overwrite:
            _check_no_training(output)
        encoder = open_encoder()
        stream = HiddenStateStream(
            reader,
            encoder,
            batch_size=cast(int, settings.batch_size),  # choose_defaults has set it
            max_batch_tokens=settings.batch_tokens,
            seed=settings.seed,
        )
        coder, judged = _learned(settings, plan, stream, output, overwrite=overwrite)
        health = coder_health(judged, coder, threads=settings.threads, device=encoder.device)
        if health["unused_atoms"] == coder.num_atoms:
            raise ValueError(f"no hidden state uses any atom, so nothing is written: {coder.why_empty(judged)}")
        coder.meta["health"] = health
        coder.save(output)
        (output / CHECKPOINT_FILE).unlink(missing_ok=True)
        print(
            "{unused_atoms} of {n_atoms} atoms never used by {n_tokens} tokens; {mean_nonzeros:.1f} non-zeros per "
            "token; relative reconstruction error {reconstruction_error:.4f}".format(**health)
        )
    return True


def _check_no_training(output: Path) -> None:
    """Raise ValueError if a training of an SAE was stopped here, whose state would be lost."""
    path = output / CHECKPOINT_FILE
    if path.is_file():
        raise ValueError(
            f"{path} belongs to a stopped training of a sparse autoencoder. Pass --overwrite to give it up, or choose "
            "another --output"
        )


def _learned(
    settings: LearningSettings, plan: dict[str, Any], stream: HiddenStateStream, output: Path, *, overwrite: bool
) -> tuple[LassoCoder | SaeCoder, np.ndarray]:
    """The learned coder, and normalized hidden states to judge it on."""
    # the order of the sums depends on the threads
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
        judged = sample[:: max(1, len(sample) // HEALTH_TOKENS)][:HEALTH_TOKENS]  # spread evenly
        return LassoCoder(Dictionary(atoms, {**meta, "tokens": len(sample)})), judged
    print(f"learning {settings.atoms} latents from {settings.tokens} hidden states", flush=True)
    start = time.perf_counter()
    with torch_threads(settings.threads):
        sae = learn_sae(stream, sae_settings(settings), output=output, plan=plan, overwrite=overwrite)
        print(f"learned in {time.perf_counter() - start:.1f} s")
        judged = normalize_rows(stream.sample(HEALTH_TOKENS, device="cpu").numpy())
    return SaeCoder(sae.to("cpu"), meta), judged


def _is_complete(output: Path, plan: dict[str, Any]) -> bool:
    """Whether ``output`` holds this very dictionary, up to rounding; ValueError where it holds another one."""
    advice = "Pass --overwrite to replace it, or choose another --output"

    def plan_of(sealed: dict[str, Any]) -> dict[str, Any]:
        # an older dictionary lacks the number
        known = {"requested_tokens": plan.get("requested_tokens"), **sealed}
        return {name: plan[name] if name in NEUTRAL else known.get(name) for name in plan}

    folder = PlannedFolder(output, plan, plan_file=None, plan_of_seal=plan_of, advice=advice)
    if folder.standing() is not Standing.COMPLETE:
        folder.check()
        return False
    load_coder(output)
    return True


def learn_sae(
    stream: HiddenStateStream, settings: SaeSettings, *, output: Path, plan: dict[str, Any], overwrite: bool = False
) -> SparseAutoencoder:
    """Train on the device of the stream's encoder; the caller removes the checkpoint when the result is saved.

    The state is saved to ``training.pt`` in ``output`` about once a minute. On one thread, a resumed training ends in
    the same bytes as one that never stopped.

    Args:
        stream: the hidden states.
        settings: what is trained.
        output: folder of the checkpoint.
        plan: everything that decides the result, as values that JSON can hold; a resumed training may have other
            :data:`NEUTRAL` ones.
        overwrite: start anew if the checkpoint was begun with another plan.

    Raises:
        ValueError: the checkpoint is damaged, or was begun with another plan; the sample has too few different rows.
    """
    path = output / CHECKPOINT_FILE
    device = stream.encoder.device
    # a GPU chooses by products in full precision, since those are no bottleneck there
    fast_bf16 = device.type == "cpu" and has_fast_bf16(device)
    state = _checkpoint(path, plan, device, overwrite=overwrite)
    if state is None:
        # more than a buffer where that may have too few different rows
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
            write_file(path, lambda file: torch.save(content, file))
            saved = time.monotonic()

    # closed also after an error or Ctrl-C, so that the thread of the stream ends
    with closing(stream.batches(trainer.updates, settings.updates)) as batches:
        return train_sae(trainer, lambda done: batches, after_update=save)


def _checkpoint(path: Path, plan: dict[str, Any], device: torch.device, *, overwrite: bool) -> dict[str, Tensor] | None:
    """The state in a checkpoint of this plan, or None."""
    if not path.is_file():
        return None
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        found, state = json.loads(content["plan"]), content["state"]
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise ValueError("its state does not consist of tensors")
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
        if overwrite:
            return None
        raise _damaged(path, error) from None
    wanted = json.loads(json.dumps(plan))
    if isinstance(found, dict):
        found = {name: wanted[name] if name in NEUTRAL else found.get(name) for name in wanted}
    named = differences(found, wanted)
    if named and not overwrite:
        raise ValueError(
            f"{path} belongs to a training that was begun with other settings: {'; '.join(named[:4])}. "
            "Pass --overwrite to start anew, or the settings that it was begun with"
        )
    return None if named else state


def _damaged(path: Path, error: Exception) -> ValueError:
    reason = str(error).split("\n", 1)[0]
    return ValueError(f"{path} is not a checkpoint of this training ({reason}); delete it to start anew")
