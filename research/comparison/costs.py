"""The cost of a row: seconds and floating-point operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

BACKWARD = 2  # a backward pass has twice the operations of a forward pass


@dataclass(frozen=True)
class ModelSize:
    """The sizes that determine the operations of an encoder.

    Attributes:
        layers, width, ffn_width: of the encoder; ``ffn_width`` is the width of the GeGLU.
        vocabulary: number of symbols.
        block: number of tokens in a block.
        masked: share of masked tokens.
    """

    layers: int
    width: int
    ffn_width: int
    vocabulary: int
    block: int
    masked: float

    def encoder(self) -> float:
        """Operations per token of a forward pass without the head: two for each product of two numbers."""
        weights = 4 * self.width**2 + 3 * self.width * self.ffn_width
        return self.layers * (2 * weights + 4 * self.block * self.width)

    def head(self, outputs: int) -> float:
        """Operations per token of the output layer: its dense layer and the projection to ``outputs``."""
        return 2 * self.width * (self.width + outputs)

    def unneeded(self) -> float:
        """Operations per token that are saved if the last layer only computes masked tokens.

        It still needs the keys and values of all tokens.
        """
        others = 2 * (2 * self.width**2 + 3 * self.width * self.ffn_width) + 4 * self.block * self.width
        return (1 - self.masked) * others

    def update(self, tokens: int, *, atoms: int = 0, vocabulary: bool = True, last_layer_of_masked: bool) -> float:
        """Operations of an update.

        Args:
            tokens: in the update.
            atoms: outputs of the latent head, 0 without one.
            vocabulary: whether the vocabulary is predicted. Without vocabulary and atoms, there is no head.
            last_layer_of_masked: the last layer only computes masked tokens.
        """
        outputs = atoms + (self.vocabulary if vocabulary else 0)
        encoder = self.encoder() - (self.unneeded() if last_layer_of_masked else 0)
        head = self.masked * self.head(outputs) if outputs else 0
        return (1 + BACKWARD) * tokens * (encoder + head)

    def coding(
        self, tokens: int, atoms: int, learned_from: int, layer: int, *,
        of_masked: bool = False, last_layer_of_masked: bool = False,
    ) -> float:  # fmt: skip
        """Operations for learning an autoencoder and coding with it; for a lasso, only the first products.

        Args:
            tokens: of the text.
            atoms: of the dictionary.
            learned_from: number of hidden states to learn from.
            layer: its hidden states are coded; the layers above it do not run.
            of_masked: only masked tokens are coded.
            last_layer_of_masked: the last of these layers only computes masked tokens.
        """
        product = 2 * self.width * atoms
        hidden = self.encoder() * layer / self.layers
        each = hidden - (self.unneeded() if last_layer_of_masked else 0) + (self.masked if of_masked else 1) * product
        return tokens * each + learned_from * (hidden + 6 * product)


@dataclass(frozen=True)
class Schedule:
    """The cost of a run after each update.

    Attributes:
        before: cost before the first update.
        parts: for each part, in order: (the update after which it begins, the cost when it begins, the cost of an
            update).
    """

    before: float
    parts: tuple[tuple[int, float, float], ...]

    def at(self, update: int) -> float:
        """The cost after an update."""
        total = self.before
        for number, (begin, once, each) in enumerate(self.parts):
            if update < begin or (update == begin and number > 0):
                break
            end = self.parts[number + 1][0] if number + 1 < len(self.parts) else update
            total += once + each * (min(update, end) - begin)
        return total


@dataclass(frozen=True)
class Phase:
    """A part of a run.

    Attributes:
        begin: the percentage of the updates after which it begins.
        each: cost of an update.
        once: cost when it begins.
    """

    begin: int
    each: float
    once: float = 0.0


def schedule_of_phases(before: float, phases: Sequence[Phase], updates: int) -> Schedule:
    """The cost of a run with ``updates`` updates."""
    return Schedule(before, tuple((updates * phase.begin // 100, phase.once, phase.each) for phase in phases))


def updates_within(budget: float, phases: Sequence[Phase]) -> int:
    """The number of updates of a run that costs ``budget``; at least one for each phase.

    Args:
        budget: in the unit of the other costs.
        phases: in order; the first begins at 0.
    """
    ends = [*(phase.begin for phase in phases[1:]), 100]
    each = sum((end - phase.begin) / 100 * phase.each for phase, end in zip(phases, ends, strict=True))
    return max(len(phases), int((budget - sum(phase.once for phase in phases)) / each))


def cost_to_reach(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """The cost at which a falling curve first reaches ``target``, interpolated linearly; None if it never does.

    Args:
        curve: (cost, loss), in the order of the cost.
        target: a loss.
    """
    if curve and curve[0][1] <= target:
        return curve[0][0]
    for (cost, loss), (next_cost, next_loss) in pairwise(curve):
        if next_loss <= target:
            return cost + (next_cost - cost) * (loss - target) / (loss - next_loss)
    return None
