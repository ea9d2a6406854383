"""Learn a sparse coder from a text, judge it, and write it with its health; one way for every kind of text."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np

from mlsm_plugin.auxiliary.sae_learning import CHECKPOINT_FILE, NEUTRAL, learn_sae
from mlsm_plugin.files.atomic_files import sha256_of_files
from mlsm_plugin.files.output_lock import only_writer
from mlsm_plugin.files.planned_folder import PlannedFolder, Standing
from mlsm_plugin.hidden_states.blocks import BlockSettings, TokenBlocks
from mlsm_plugin.hidden_states.devices import default_device
from mlsm_plugin.hidden_states.encoder import TokenVectors
from mlsm_plugin.hidden_states.samples import sample_hidden_states
from mlsm_plugin.hidden_states.stream import HiddenStateStream
from mlsm_plugin.sparse_coding.coder import load_coder
from mlsm_plugin.sparse_coding.dictionary import Dictionary, coder_health, import_published, learn_dictionary
from mlsm_plugin.sparse_coding.encode import normalize_rows
from mlsm_plugin.sparse_coding.lasso import LassoCoder
from mlsm_plugin.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.sparse_coding.sae_training import SaeSettings
from mlsm_plugin.sparse_coding.thread_counts import torch_threads
from mlsm_plugin.version import __version__

# number of tokens on which the health of the dictionary is measured
HEALTH_TOKENS = 20_000
LASSO = "lasso"
CODERS = (LASSO, "topk", "batchtopk")
# options that only one kind of coder has, and the defaults of each kind
LASSO_DEFAULTS: dict[str, Any] = {"lambda_": 0.05, "iterations": 1000, "backend": "spams", "published": None}
SAE_DEFAULTS: dict[str, Any] = {"k": 32, "matryoshka": [], "learning_rate": 3e-3}
# what the meta.json of a dictionary calls each backend
METHODS = {"spams": "spams.trainDL", "torch": "online"}
BATCH_SIZES = {LASSO: 400, "topk": 256, "batchtopk": 256}
OPTION_NAMES = {"lambda_": "--lambda", "published": "--import", "learning_rate": "--learning-rate"}
# options that decide what is learned, and so do nothing for a published dictionary
OF_LEARNING = "atoms", "tokens", "iterations", "batch_size", "backend", "frequency_pruning", "pruning_threshold"
POSITIVE = (
    *("atoms", "lambda_", "tokens", "iterations", "batch_size", "threads", "pruning_threshold", "batch_tokens", "k"),
    "learning_rate",
)


@dataclass
class LearningSettings:
    """What is learned, and from how much; None stands for the default of the kind of coder.

    Attributes:
        layer: hidden state to learn from: 0 is the embeddings, 1 the first layer, ...
        coder: ``lasso`` for a dictionary, ``topk`` or ``batchtopk`` for a sparse autoencoder.
        atoms: number of latent properties.
        tokens: number of hidden states to learn from.
        batch_size: hidden states in a mini-batch (400, of an autoencoder 256).
        lambda_, iterations, backend, published: of a dictionary: weight of the L1 penalty (0.05), number of
            mini-batches (1000), ``spams`` (default) or ``torch``, and a published dictionary (npy) to import instead.
        k, matryoshka, learning_rate: of an autoencoder: active latents of a token (32), sizes of prefixes that also
            have to reconstruct alone (none), and largest learning rate (0.003).
        frequency_pruning, pruning_threshold: see :func:`~mlsm_plugin.sparse_coding.frequency_pruning.keep_mask`.
        seed: of the sample and the first atoms.
        fp16: run the model in half precision.
        threads: CPU threads, None for all cores.
        batch_tokens: tokens in one forward pass.

    Raises:
        ValueError: a value is out of range, or an option belongs to the other kind of coder, or to learning where a
            dictionary is imported.
    """

    layer: int
    coder: str = LASSO
    atoms: int = 3000
    tokens: int = 1_000_000
    batch_size: int | None = None
    lambda_: float | None = None
    iterations: int | None = None
    backend: str | None = None
    published: str | os.PathLike[str] | None = None
    k: int | None = None
    matryoshka: list[int] | None = None
    learning_rate: float | None = None
    frequency_pruning: str = "none"
    pruning_threshold: float = 1e-5
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
                raise ValueError(f"--{name.strip('_').replace('_', '-')} must be positive, got {value}")
        if self.published and self.coder == LASSO:
            self._check_import()
        choose_defaults(self)
        if self.coder != LASSO:
            sae_settings(self)  # raises if a value is out of range
        if self.seed < 0:
            raise ValueError(f"--seed must not be negative, got {self.seed}")

    def _check_import(self) -> None:
        for field in fields(self):
            if field.name in OF_LEARNING and getattr(self, field.name) != field.default:
                option = f"--{field.name.replace('_', '-')}"
                raise ValueError(f"{option} does not go with --import, which learns nothing; leave it out")


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
            option = OPTION_NAMES.get(name, f"--{name}")
            raise ValueError(f"{option} does not go with --coder {args.coder}; leave it out, or pass --coder {owner}")
    for name, default in {**own, "batch_size": BATCH_SIZES[args.coder]}.items():
        if getattr(args, name, None) is None:
            setattr(args, name, default)


def usual_backend(device: str | None, recorded: str | None) -> str:
    """The backend where no option says it: ``torch`` on a GPU, which ``spams`` cannot use.

    Args:
        device: as for :func:`~mlsm_plugin.hidden_states.devices.default_device`.
        recorded: the ``method`` of a dictionary that is there: it decides, so that the same command finds it complete.
    """
    names = [name for name, method in METHODS.items() if method == recorded]
    return names[0] if names else "spams" if default_device(device).type == "cpu" else "torch"


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
    settings: LearningSettings, *, auxiliary: str, split: str | Callable[[], str], blocks: BlockSettings | None
) -> dict[str, Any]:
    """What decides the coder, as ``meta.json`` will have it.

    Args:
        settings: what is learned.
        auxiliary: fingerprint of the model.
        split: fingerprint of the text, or a function that computes it; not used by an import.
        blocks: how the text was cut; None if it consists of blocks.
    """
    plan: dict[str, Any] = {
        "layer": settings.layer,
        **({"lambda": settings.lambda_} if settings.coder == LASSO else {}),
        "auxiliary_fingerprint": auxiliary,
        **({"blocks": asdict(blocks)} if blocks else {}),
        "fp16": settings.fp16,
    }
    if settings.coder == LASSO and settings.published:
        return {**plan, "imported_fingerprint": sha256_of_files(settings.published)}
    names = ["batch_size", "frequency_pruning", "pruning_threshold", "seed", "batch_tokens"]
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
    return {**plan, "split_fingerprint": split if isinstance(split, str) else split()}


def learn_into(
    output: Path,
    settings: LearningSettings,
    plan: dict[str, Any],
    reader: TokenBlocks,
    open_encoder: Callable[[], TokenVectors],
    *,
    overwrite: bool = False,
) -> bool:
    """Learn or import a coder and save it, unless it is already there.

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
        ValueError: another coder or its stopped training is there, another process writes to the folder, the imported
            dictionary does not fit the model, frequency pruning removed all tokens, or no hidden state uses any atom.
    """
    with only_writer(output):
        if not overwrite and _is_complete(output, plan):
            return False
        if settings.coder == LASSO and not overwrite:
            _check_no_training(output)
        learn, encoder = _lasso if settings.coder == LASSO else _sae, open_encoder()
        coder, judged = learn(settings, plan, reader, encoder, output, overwrite)
        health = coder_health(judged, coder, threads=settings.threads, device=encoder.device)
        if health.unused_atoms == coder.num_atoms:
            raise ValueError(f"no hidden state uses any atom, so nothing is written: {coder.why_empty(judged)}")
        coder.meta["health"] = health.as_dict()
        coder.save(output)
        (output / CHECKPOINT_FILE).unlink(missing_ok=True)
        print(health)
    return True


def _check_no_training(output: Path) -> None:
    """Raise ValueError if a training of an SAE was stopped here, whose state would be lost."""
    path = output / CHECKPOINT_FILE
    if path.is_file():
        raise ValueError(
            f"{path} belongs to a stopped training of a sparse autoencoder. Pass --overwrite to give it up, or choose "
            "another --output"
        )


def _lasso(
    settings: LearningSettings,
    plan: dict[str, Any],
    reader: TokenBlocks,
    encoder: TokenVectors,
    output: Path,
    overwrite: bool,
) -> tuple[LassoCoder, np.ndarray]:
    """The learned or imported dictionary, and hidden states to judge it on."""
    given = settings.lambda_, settings.iterations, settings.batch_size, settings.backend
    lambda_, iterations, batch_size, backend = cast(tuple[float, int, int, str], given)  # choose_defaults has set them
    published = import_published(settings.published, encoder.dim) if settings.published else None
    sample = sample_hidden_states(
        reader,
        encoder,
        num_tokens=HEALTH_TOKENS if published else settings.tokens,
        max_batch_tokens=settings.batch_tokens,
        frequency_pruning="none" if published else settings.frequency_pruning,
        pruning_threshold=settings.pruning_threshold,
        seed=settings.seed,
    )
    if published is not None:
        atoms = published.atoms
        meta = {**plan, **published.meta}
    else:
        print(f"learning {settings.atoms} atoms from {len(sample)} hidden states", flush=True)
        start = time.perf_counter()
        atoms = learn_dictionary(
            sample,
            num_atoms=settings.atoms,
            lambda_=lambda_,
            iterations=iterations,
            batch_size=batch_size,
            threads=settings.threads,
            seed=settings.seed,
            backend=backend,
            device=encoder.device,
        )
        print(f"learned in {time.perf_counter() - start:.1f} s")
        # the order of the sums depends on the threads
        meta = {
            **plan,
            "tokens": len(sample),
            "threads": settings.threads or os.cpu_count(),
            "mlsm_plugin": __version__,
        }
    return LassoCoder(Dictionary(atoms, meta)), _judged(sample)


def _sae(
    settings: LearningSettings,
    plan: dict[str, Any],
    reader: TokenBlocks,
    encoder: TokenVectors,
    output: Path,
    overwrite: bool,
) -> tuple[SaeCoder, np.ndarray]:
    """A trained SAE, whose training may have been resumed, and hidden states to judge it on."""
    batch_size = cast(int, settings.batch_size)  # choose_defaults has set it
    stream = HiddenStateStream(
        reader,
        encoder,
        batch_size=batch_size,
        max_batch_tokens=settings.batch_tokens,
        frequency_pruning=settings.frequency_pruning,
        pruning_threshold=settings.pruning_threshold,
        seed=settings.seed,
    )
    print(f"learning {settings.atoms} latents from {settings.tokens} hidden states", flush=True)
    start = time.perf_counter()
    with torch_threads(settings.threads):
        sae = learn_sae(stream, sae_settings(settings), output=output, plan=plan, overwrite=overwrite)
        print(f"learned in {time.perf_counter() - start:.1f} s")
        judged = normalize_rows(stream.sample(HEALTH_TOKENS).cpu().numpy())
    meta = {**plan, "threads": settings.threads or os.cpu_count(), "mlsm_plugin": __version__}
    return SaeCoder(sae.to("cpu"), meta), judged


def _judged(sample: np.ndarray) -> np.ndarray:
    """Rows that are spread evenly over the sample, at most about ``HEALTH_TOKENS``."""
    return sample[:: max(1, len(sample) // HEALTH_TOKENS)][:HEALTH_TOKENS]


def _is_complete(output: Path, plan: dict[str, Any]) -> bool:
    """Whether ``output`` holds this very dictionary, up to rounding; ValueError where it holds another one."""
    advice = "Pass --overwrite to replace it, or choose another --output"

    def plan_of(sealed: dict[str, Any]) -> dict[str, Any]:
        # an older dictionary, or an import, lacks the number
        known = {"requested_tokens": plan.get("requested_tokens"), **sealed}
        return {name: plan[name] if name in NEUTRAL else known.get(name) for name in plan}

    folder = PlannedFolder(output, plan, plan_file=None, plan_of_seal=plan_of, advice=advice)
    if folder.standing() is not Standing.COMPLETE:
        folder.check()
        return False
    load_coder(output)
    return True
