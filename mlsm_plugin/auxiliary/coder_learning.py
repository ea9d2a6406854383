"""Learn a sparse coder from a text, judge it, and write it with its health; one way for every kind of text."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from mlsm_plugin.auxiliary.sae_learning import CHECKPOINT_FILE, NEUTRAL, learn_sae
from mlsm_plugin.files.output_lock import only_writer
from mlsm_plugin.files.planned_folder import PlannedFolder
from mlsm_plugin.files.settings import check, option, seed
from mlsm_plugin.hidden_states.blocks import BlockSettings, ModelRun, TokenBlocks, layer
from mlsm_plugin.hidden_states.encoder import TokenVectors
from mlsm_plugin.hidden_states.samples import sample_hidden_states
from mlsm_plugin.hidden_states.stream import HiddenStateStream
from mlsm_plugin.sparse_coding.coder import load_coder
from mlsm_plugin.sparse_coding.dictionary import Dictionary, learn_dictionary
from mlsm_plugin.sparse_coding.encode import normalize_rows
from mlsm_plugin.sparse_coding.lasso import LassoCoder
from mlsm_plugin.sparse_coding.quality import coder_health
from mlsm_plugin.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.sparse_coding.sae_training import SaeSettings
from mlsm_plugin.sparse_coding.thread_counts import torch_threads
from mlsm_plugin.version import __version__

# number of tokens on which the health of the dictionary is measured
HEALTH_TOKENS = 20_000
LASSO = "lasso"
CODERS = (LASSO, "topk", "batchtopk")
# options that only one kind of coder has, and the defaults of each kind
LASSO_DEFAULTS: dict[str, Any] = {"lambda_": 0.05, "iterations": 1000, "backend": "torch", "batch_size": 400}
SAE_DEFAULTS: dict[str, Any] = {"k": 32, "matryoshka": [], "learning_rate": 3e-3, "batch_size": 256}
# what the meta.json of a dictionary calls each backend
METHODS = {"spams": "spams.trainDL", "torch": "online"}


@dataclass(frozen=True)
class LearningSettings(ModelRun):
    """What is learned, and from how much; an option of a kind of coder that is None gets the default of that kind.

    Raises:
        ValueError: a value is out of range, or an option belongs to the other kind of coder.
    """

    layer: int = layer()
    coder: str = option(
        LASSO, choices=CODERS,
        help="lasso: a dictionary for exact sparse codes; topk, batchtopk: a sparse autoencoder (docs/dictionaries.md)",
    )  # fmt: skip
    atoms: int = option(3000, least=1, help="number of latent properties")
    tokens: int = option(
        1_000_000, least=1,
        help="hidden states to learn from; those of an SAE are not kept, and may be read several times",
    )  # fmt: skip
    batch_size: int | None = option(
        None, least=1, help="hidden states in a mini-batch (default: 400; of an SAE: 256)"
    )
    lambda_: float | None = option(None, above=0, help="lasso: weight of the L1 penalty (default: 0.05)")
    iterations: int | None = option(None, least=1, help="lasso: number of mini-batches (default: 1000)")
    backend: str | None = option(
        None, choices=tuple(METHODS),
        help="lasso: torch: online learning with the active-set solver; spams: spams.trainDL, on the CPU (default: "
        "torch)",
    )  # fmt: skip
    k: int | None = option(
        None, least=1, help="SAE: active latents of a token, on average with batchtopk (default: 32)"
    )
    matryoshka: list[int] | None = option(
        None, least=1, metavar="M",
        help="SAE: sizes of prefixes, ascending; the first M latents of each also have to reconstruct alone",
    )  # fmt: skip
    learning_rate: float | None = option(None, above=0, help="SAE: largest learning rate of Adam (default: 0.003)")
    frequency_pruning: str = option(
        "none", choices=("none", "subsample", "drop"),
        help="subsample: keep an occurrence with word2vec's probability; drop: keep only words below the threshold",
    )  # fmt: skip
    pruning_threshold: float = option(
        1e-5, above=0, help="threshold of --frequency-pruning, a relative frequency"
    )
    seed: int = seed("of the sample and the first atoms")

    def __post_init__(self) -> None:
        check(self)
        own, other = (LASSO_DEFAULTS, SAE_DEFAULTS) if self.coder == LASSO else (SAE_DEFAULTS, LASSO_DEFAULTS)
        for name in other.keys() - own.keys():
            if getattr(self, name) is not None:
                owner = " or ".join(coder for coder in CODERS if (coder == LASSO) != (self.coder == LASSO))
                raise ValueError(f"{name} does not go with coder {self.coder}; leave it out, or choose {owner}")
        for name, default in own.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if self.coder != LASSO:
            sae_settings(self)  # raises if a value is out of range


def sae_settings(settings: LearningSettings) -> SaeSettings:
    """What the options of an SAE ask for.

    Raises:
        ValueError: a value is out of range.
    """
    kind = {name: cast(Any, getattr(settings, name)) for name in SAE_DEFAULTS}  # none of them is None any more
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
        ValueError: another coder or its stopped training is there, another process writes to the folder, frequency
            pruning removed all tokens, or no hidden state uses any atom.
    """
    with only_writer(output):
        if not overwrite and _is_complete(output, plan):
            return False
        if settings.coder == LASSO and not overwrite:
            _check_no_training(output)
        learn, encoder = _lasso if settings.coder == LASSO else _sae, open_encoder()
        coder, judged = learn(settings, plan, reader, encoder, output, overwrite)
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


def _lasso(
    settings: LearningSettings,
    plan: dict[str, Any],
    reader: TokenBlocks,
    encoder: TokenVectors,
    output: Path,
    overwrite: bool,
) -> tuple[LassoCoder, np.ndarray]:
    """The learned dictionary, and hidden states to judge it on."""
    given = settings.lambda_, settings.iterations, settings.batch_size, settings.backend
    lambda_, iterations, batch_size, backend = cast(tuple[float, int, int, str], given)  # choose_defaults has set them
    sample = sample_hidden_states(
        reader,
        encoder,
        num_tokens=settings.tokens,
        max_batch_tokens=settings.batch_tokens,
        frequency_pruning=settings.frequency_pruning,
        pruning_threshold=settings.pruning_threshold,
        seed=settings.seed,
    )
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
    threads = settings.threads or os.cpu_count()
    meta = {**plan, "tokens": len(sample), "threads": threads, "mlsm_plugin": __version__}
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
    deciding = {name: value for name, value in plan.items() if name not in NEUTRAL}
    if not PlannedFolder(output, deciding, plan_file=None, advice=advice).is_complete():
        return False
    load_coder(output)
    return True
