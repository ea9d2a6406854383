"""Train sparse autoencoders: TopK (Gao et al., 2024, arXiv 2406.04093), BatchTopK (Bussmann et al., 2024,
arXiv 2412.06410), and either with Matryoshka prefixes (Bussmann et al., 2025, arXiv 2503.17547).

The gradients are written by hand, since only the chosen latents have a gradient; see
:class:`~mlsm_plugin.core.sparse_coding.sparse_autoencoder.ChosenLatents`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.files.settings import check, option, seed
from mlsm_plugin.core.sparse_coding.dictionary import sample_distinct_rows
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import (
    ChosenLatents,
    SaeConfig,
    SaeWeights,
    SparseAutoencoder,
    constant_norm_scale,
    largest,
    largest_of_all,
    row_indices,
)

METHODS = ("topk", "batchtopk")
# shares of the updates with a growing, and with a falling learning rate
WARM_UP = 0.05
DECAY = 0.2
LONGEST_WARM_UP = 1000
# Gao et al. (2024), sections 2.1 and A.2: weight of the auxiliary loss, and epsilon of Adam
AUXILIARY_WEIGHT = 1 / 32
ADAM_EPSILON = 6.25e-10
# Against overfitting. After 20 passes over 16,000 hidden states of a pre-trained model (3,000 latents, k 42, batches of
# 256), TopK explained 0.856 of the variance of held-out hidden states; without weight decay 0.846 (10 passes, or 20 in
# batches of 512).
WEIGHT_DECAY = 1.0
# As in online dictionary learning, a latent is dead if the last DEAD_ROWS_PER_LATENT * n_atoms rows did not use it.
DEAD_ROWS_PER_LATENT = 10
# Share of the mean eigenvalue of the covariance; see SaeTrainer.begin. After ten passes over 16,000 hidden states of a
# pre-trained model (3,000 latents, k 42), 0, 14 and 278 latents were never active with 0.03, 0.1 and 1. With an encoder
# initialized as the transpose of the decoder, it was about 550.
RIDGE = 0.03
ROWS_TO_SCALE = 4096
MOMENTUM = 0.95  # weight of the past in the running mean of BatchTopK's threshold
CANDIDATES = 0.8  # the latents that BatchTopK searches first are above this share of the last threshold
TINY = 1e-30


@dataclass(frozen=True)
class SaeSettings:
    """Settings of an SAE and its training; ValueError if a value is out of range."""

    num_atoms: int = option(help="number of latents")
    k: int = option(help="active latents: of each row with topk, of a row on average with batchtopk")
    updates: int = option(least=1, help="number of batches")
    method: str = option("topk", choices=METHODS, help="how the active latents are chosen")
    prefixes: tuple[int, ...] = option(
        (), help="ascending sizes of Matryoshka prefixes, below num_atoms; each has to reconstruct alone, too"
    )
    rate: float = option(3e-3, above=0, help="largest learning rate of Adam")
    auxiliary_weight: float = option(AUXILIARY_WEIGHT, help="weight of the auxiliary loss, which revives dead latents")
    # rare latents do not fade
    weight_decay: float = option(
        WEIGHT_DECAY, help="share of the learning rate by which an update shrinks encoder rows that its batch activated"
    )
    seed: int = seed("of the first weights")

    def __post_init__(self) -> None:
        check(self)
        if not 1 <= self.k <= self.num_atoms:
            raise ValueError(f"k must be from 1 to the number of atoms, {self.num_atoms}, got {self.k}")
        if not 0 <= self.rate * self.weight_decay < 1:
            raise ValueError(f"the learning rate times the weight decay must be below 1, got {self.rate}")
        ends = [0, *self.prefixes, self.num_atoms]
        if any(first >= second for first, second in pairwise(ends)):
            raise ValueError(
                f"Matryoshka prefixes must be ascending, at least 1 and below the number of atoms, {self.num_atoms}, "
                f"got {' '.join(map(str, self.prefixes))}"
            )


class Parameters(NamedTuple):
    """The trained tensors, or their gradients."""

    encoder: Tensor  # (n_atoms, dim)
    encoder_bias: Tensor  # (n_atoms,)
    decoder: Tensor  # (n_atoms, dim), unit rows
    decoder_bias: Tensor  # (dim,)


class Figures(NamedTuple):
    """How well a batch was coded, before its update."""

    loss: float  # reconstruction losses of all prefixes plus auxiliary loss, relative to the data's variance
    explained_variance: float  # 1 - sum ||x - x_hat||^2 / sum ||x - mean||^2
    l0: float  # mean number of active latents of a row
    dead: int  # number of dead latents


class SaeTrainer:
    """Weights, optimizer and counts of a training. Make it with :meth:`begin` or :meth:`resume`.

    Rows are first scaled to the norm sqrt(dim) (``constant_norm``). The ``parameters`` are changed in place.
    ``variance`` is the mean of ``||x - mean||^2``, the unit of the losses. With ``fast_bf16``, products in bfloat16
    choose the latents of a row, and their values are computed again in float32.
    """

    def __init__(
        self, settings: SaeSettings, parameters: Parameters, variance: float, *, fast_bf16: bool = False
    ) -> None:
        self.settings = settings
        self.parameters = parameters
        self.variance = variance
        self.fast_bf16 = fast_bf16
        self.updates = self.seen = 0
        self.threshold = 0.0
        self.last_use = torch.zeros(settings.num_atoms, dtype=torch.int64, device=parameters.encoder.device)
        self.optimizer = torch.optim.Adam(list(parameters), lr=settings.rate, eps=ADAM_EPSILON, fused=True)

    @classmethod
    def begin(
        cls, settings: SaeSettings, sample: Tensor, *, fast_bf16: bool = False, dtype: torch.dtype = torch.float32
    ) -> "SaeTrainer":
        """Start a training with weights initialized from data.

        The decoder's bias is the mean; its rows are distinct rows of the sample, less the mean. Each row of the encoder
        is the decoder's row times ``(C + RIDGE * trace(C) / dim)^-1``, where ``C`` is the covariance. Without the
        inverse, rows would only activate latents along the few directions in which the rows differ most, and many
        latents would die in the first updates. The encoder is scaled to the least squared error.

        ``sample`` is (n, dim) finite hidden states, on the training's device. ValueError if it has fewer distinct rows
        than there are atoms.
        """
        x = constant_norm(sample.to(dtype))
        mean = x.mean(0)
        x = x - mean
        rng = np.random.default_rng(settings.seed)
        rows = sample_distinct_rows(x.float().cpu().numpy(), settings.num_atoms, rng)
        decoder = torch.from_numpy(rows).to(x)
        covariance = (x.T @ x / len(x)).double().cpu()
        ridge = RIDGE * float(covariance.trace()) / x.shape[1] * torch.eye(x.shape[1], dtype=torch.float64)
        encoder = decoder @ torch.linalg.inv(covariance + ridge).to(x)
        encoder /= torch.linalg.vector_norm(encoder, dim=1, keepdim=True)
        parameters = Parameters(encoder, x.new_zeros(len(decoder)), decoder, mean)
        trainer = cls(settings, parameters, float(x.square().sum(1).mean()), fast_bf16=fast_bf16)
        part = x[:ROWS_TO_SCALE]
        chosen = trainer.chosen_latents(part)
        reconstruction = chosen.times(chosen.products(part, encoder).relu(), decoder)
        encoder *= float((reconstruction * part).sum() / reconstruction.square().sum().clamp(min=TINY))
        trainer.threshold = 0.0
        return trainer

    @classmethod
    def resume(cls, settings: SaeSettings, state: dict[str, Tensor], *, fast_bf16: bool = False) -> "SaeTrainer":
        """Continue from a :meth:`state`; ValueError if a tensor is missing or has another shape."""
        try:
            parameters = Parameters(*(state[name].clone() for name in Parameters._fields))
            trainer = cls(settings, parameters, float(state["variance"]), fast_bf16=fast_bf16)
            trainer.updates = int(state["updates"])
            trainer.seen = int(state["seen"])
            trainer.threshold = float(state["threshold"])
            trainer.last_use.copy_(state["last_use"])
            for name, parameter in parameters._asdict().items():
                moments = {key: state[f"{name}.{key}"].clone() for key in ("step", "exp_avg", "exp_avg_sq")}
                trainer.optimizer.state[parameter] = moments
                if not parameter.shape == moments["exp_avg"].shape == moments["exp_avg_sq"].shape:
                    raise ValueError(f"the moments of {name} have another shape")
        except (KeyError, RuntimeError) as error:
            raise ValueError(f"a tensor does not fit: {error}") from None
        return trainer

    def state(self) -> dict[str, Tensor]:
        """The state that the rest of the training depends on, besides the settings and the rows."""
        counts = {"updates": self.updates, "seen": self.seen}
        numbers = {"variance": self.variance, "threshold": self.threshold}
        state = {name: torch.tensor(value) for name, value in counts.items()}
        state |= {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
        state |= {"last_use": self.last_use, **self.parameters._asdict()}
        for name, parameter in self.parameters._asdict().items():
            state |= {f"{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        return state

    def sae(self) -> SparseAutoencoder:
        """The SAE with the present weights; for BatchTopK, with one threshold for all latents."""
        settings = self.settings
        weights = Parameters(*(tensor.clone() for tensor in self.parameters))
        if settings.method == "topk":
            return SparseAutoencoder(SaeConfig("topk", settings.k, input_norm="constant_norm"), SaeWeights(*weights))
        threshold = torch.full_like(weights.encoder_bias, self.threshold)
        return SparseAutoencoder(SaeConfig("jumprelu", input_norm="constant_norm"), SaeWeights(*weights, threshold))

    @property
    def dead(self) -> Tensor:
        """Indices of the dead latents."""
        return torch.nonzero(self.seen - self.last_use > DEAD_ROWS_PER_LATENT * self.settings.num_atoms).squeeze(1)

    def update(self, rows: Tensor) -> Figures:
        """One step of Adam on a batch (n, dim), for the latents that have a gradient.

        Other latents and their moments do not change. If second moments faded, the next gradient would move a rare
        latent too far, and momentum would keep moving it until no row activates it.
        """
        gradients, figures = self.gradients(constant_norm(rows.to(self.parameters.encoder)))
        decoder = self.parameters.decoder
        gradients.decoder.sub_((gradients.decoder * decoder).sum(1, keepdim=True) * decoder)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        rate = self.settings.rate * schedule(self.updates, self.settings.updates)
        self.optimizer.param_groups[0]["lr"] = rate
        resting = torch.nonzero(gradients.encoder_bias == 0).squeeze(1)
        of_latents = self.parameters[:3]  # all but the bias of the decoder
        moments = [moment for parameter in of_latents for moment in self.optimizer.state[parameter].values()]
        parts = [part for part in (*of_latents, *moments) if part.dim()]  # not the number of steps
        before = [part[resting] for part in parts]
        self.optimizer.step()
        for part, values in zip(parts, before, strict=True):
            part[resting] = values
        kept = 1 - rate * self.settings.weight_decay * (self.last_use == self.seen).to(decoder)
        self.parameters.encoder.mul_(kept[:, None])
        decoder /= torch.linalg.vector_norm(decoder, dim=1, keepdim=True).clamp(min=TINY)
        self.updates += 1
        return figures

    def gradients(self, x: Tensor) -> tuple[Parameters, Figures]:
        """Gradients of the loss of normalized rows (n, dim), and the figures; counts the rows as seen.

        The choice of latents and, in the auxiliary loss, the residual are constants.
        """
        weights = self.parameters
        size = len(x)
        centred = x - weights.decoder_bias
        chosen = self.chosen_latents(centred)
        values = (chosen.products(centred, weights.encoder) + weights.encoder_bias[chosen.columns]).relu()
        active = values > 0
        layered, order, layers = self._layers(chosen)
        parts = layered.times(values[order], weights.decoder).view(layers, *x.shape)
        residuals = parts.cumsum(0) - centred  # of each prefix: x_hat - x
        unit = 1 / (size * self.variance)
        # a latent takes part in its own layer and in all later layers
        errors = 2 * unit * residuals.flip(0).cumsum(0).flip(0)
        decoder = layered.transposed_times(values[order], errors.flatten(0, 1))
        of_values = torch.empty_like(values)
        of_values[order] = layered.products(errors.flatten(0, 1), weights.decoder)
        of_values *= active
        encoder_bias = chosen.sums(of_values)
        gradients = Parameters(
            chosen.transposed_times(of_values, centred),
            encoder_bias,
            decoder,
            errors[0].sum(0) - encoder_bias @ weights.encoder,
        )
        self.seen += size
        self.last_use[chosen.columns[active]] = self.seen
        loss = float(residuals.square().sum()) * unit
        dead = self.dead
        if len(dead) and self.settings.auxiliary_weight:
            loss += self._add_auxiliary(gradients, centred, -residuals[-1], dead)
        unexplained = residuals[-1].square().sum() / (x - x.mean(0)).square().sum().clamp(min=TINY)
        return gradients, Figures(loss, 1 - float(unexplained), float(active.sum()) / size, len(dead))

    def _layers(self, chosen: ChosenLatents) -> tuple[ChosenLatents, Tensor, int]:
        """The latents with a block of rows for the latents that each prefix adds; their order; the number of blocks."""
        size, width = chosen.shape
        if not self.settings.prefixes:
            return chosen, torch.arange(len(chosen.rows), device=chosen.rows.device), 1
        ends = torch.tensor(self.settings.prefixes, device=chosen.rows.device)
        layer = torch.bucketize(chosen.columns, ends, right=True)
        order = torch.argsort(layer, stable=True)
        layers = len(ends) + 1
        rows = (layer * size + chosen.rows)[order]
        return ChosenLatents(rows, chosen.columns[order], (layers * size, width)), order, layers

    def _add_auxiliary(self, gradients: Parameters, centred: Tensor, residual: Tensor, dead: Tensor) -> float:
        """Add the gradients of the auxiliary loss, and return the loss (Gao et al., 2024, section A.2)."""
        encoder = self.parameters.encoder[dead]
        decoder = self.parameters.decoder[dead]
        pre = torch.addmm(self.parameters.encoder_bias[dead], centred, encoder.T)
        # the strongest dim / 2 of the dead latents predict the residual
        values, columns = largest(pre, min(len(dead), max(1, centred.shape[1] // 2)))
        latents = torch.zeros_like(pre).scatter_(1, columns, values.relu())
        error = latents @ decoder - residual
        unit = self.settings.auxiliary_weight / (len(centred) * self.variance)
        of_latents = 2 * unit * (error @ decoder.T) * (latents > 0)
        sums = of_latents.sum(0)
        gradients.encoder[dead] += of_latents.T @ centred
        gradients.encoder_bias[dead] += sums
        gradients.decoder[dead] += 2 * unit * (latents.T @ error)
        gradients.decoder_bias.sub_(sums @ encoder)
        return float(error.square().sum()) * unit

    def chosen_latents(self, centred: Tensor) -> ChosenLatents:
        """The latents that may be active; moves the threshold of BatchTopK."""
        settings = self.settings
        weights = self.parameters
        dtype = torch.bfloat16 if self.fast_bf16 else centred.dtype
        pre = torch.addmm(weights.encoder_bias.to(dtype), centred.to(dtype), weights.encoder.to(dtype).T)
        shape = (len(pre), settings.num_atoms)
        if settings.method == "topk":
            columns = largest(pre, settings.k)[1]
            return ChosenLatents(row_indices(columns), columns.flatten(), shape)
        places = largest_of_all(pre, settings.k * len(pre), CANDIDATES * self.threshold)
        kept = pre.flatten()[places]
        smallest = float(kept[kept > 0].min()) if bool((kept > 0).any()) else 0.0
        self.threshold = MOMENTUM * self.threshold + (1 - MOMENTUM) * smallest if self.threshold else smallest
        rows = places // settings.num_atoms
        return ChosenLatents(rows, places - rows * settings.num_atoms, shape)


def train_sae(
    trainer: SaeTrainer,
    batches: Iterator[Tensor],
    *,
    after_update: Callable[[], None] | None = None,
    log: Callable[[Mapping[str, float], int], None] | None = None,
) -> SparseAutoencoder:
    """Do the remaining updates, each on a batch (n, dim); after each, ``after_update`` may save the state.

    ``log`` gets the :class:`Figures` by name and the number of the update, at most 2,000 times.
    """
    settings = trainer.settings
    every = max(1, settings.updates // 1000)
    with Progress(total=settings.updates, initial=trainer.updates, desc="training the SAE", unit="batch") as progress:
        while trainer.updates < settings.updates:
            figures = trainer.update(next(batches))
            progress.set_postfix(
                explained=f"{figures.explained_variance:.3f}", l0=f"{figures.l0:.1f}", dead=figures.dead, refresh=False
            )
            progress.update()
            if log is not None and (trainer.updates % every == 0 or trainer.updates == settings.updates):
                log(figures._asdict(), trainer.updates)
            if after_update is not None:
                after_update()
    return trainer.sae()


def schedule(done: int, total: int) -> float:
    """The learning rate after ``done`` of ``total`` updates, relative: it warms up, stays at 1, and falls to 0."""
    up = max(1, min(LONGEST_WARM_UP, round(total * WARM_UP)))
    return min(1.0, (done + 1) / up, (total - done) / max(1, round(total * DECAY)))


def constant_norm(rows: Tensor) -> Tensor:
    """Rows (n, dim) scaled to the norm sqrt(dim); a row of zeros stays zero."""
    return rows / constant_norm_scale(rows)
