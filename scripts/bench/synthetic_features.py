"""Hidden states with known true features, as in SynthSAEBench (Chanin and Garriga-Alonso, 2026, arXiv 2602.14687).

A hidden state is a sum of feature directions, each times its activation, plus a bias. Features fire with Zipfian
frequencies and are correlated: each feature fires where a Gaussian with low-rank covariance exceeds its threshold. Some
features are in trees. A child fires only with its parent, its activation is proportional to the parent's, and at most
one of several siblings fires. The defaults are those of SynthSAEBench-16k, with a size that two cores manage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from scipy.stats import norm

ROWS_AT_ONCE = 10_000


@dataclass(frozen=True)
class Recipe:
    """How the features are drawn.

    Attributes:
        features, dim: their number and width.
        exponent, most, least: frequencies fall from ``most`` to ``least`` as the rank to the power of ``-exponent``.
        roots, branching, depth: of the trees; a root is at depth 0. Features are numbered by depth and by frequency:
            the roots are the most frequent features, and the remaining features are in no tree.
        rank, correlation: columns of the factor of the covariance, and the deviation of its entries.
        first, last: mean activation of the most frequent and of the rarest feature; linear between them.
        spread: the deviation of a feature's activation is drawn as ``|N(spread, spread)|``.
        bias: norm of the bias.
    """

    features: int = 512
    dim: int = 128
    exponent: float = 0.5
    most: float = 0.4
    least: float = 5e-4
    roots: int = 16
    branching: int = 4
    depth: int = 2
    rank: int = 25
    correlation: float = 0.1
    first: float = 5.0
    last: float = 4.0
    spread: float = 0.5
    bias: float = 0.5


class SyntheticFeatures:
    """Features that are drawn once, and samples of hidden states made from them.

    Attributes:
        vectors: (features, dim), unit rows, almost orthogonal.
        parents: (features,), -1 for a feature without a parent.
        frequencies: (features,), how often each feature should fire.
    """

    def __init__(self, recipe: Recipe, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.recipe = recipe
        self.vectors = spread_out(rng.normal(size=(recipe.features, recipe.dim)))
        direction = rng.normal(size=recipe.dim)
        self.bias = recipe.bias * direction / np.linalg.norm(direction)
        self.frequencies = zipf_frequencies(recipe)
        self.parents, self.families = trees(recipe)
        self.means = np.linspace(recipe.first, recipe.last, recipe.features)
        self.deviations = np.abs(rng.normal(recipe.spread, recipe.spread, size=recipe.features))
        factor = recipe.correlation * rng.normal(size=(recipe.features, recipe.rank))
        factor *= np.minimum(1, np.sqrt(0.99 / (factor**2).sum(axis=1)))[:, None]
        self._factor = factor
        self._noise = np.sqrt(1 - (factor**2).sum(axis=1))
        self._thresholds = norm.isf(np.minimum(1, self.frequencies * self._corrections()))

    def _corrections(self) -> np.ndarray:
        """Approximately how much more often a child must try to fire to end up at its frequency.

        A child can only fire with its parent, and at most one of the siblings fires.
        """
        corrections = np.ones(self.recipe.features)
        for level in self.families:
            for family in level:
                above = self.frequencies[self.parents[family[0]]]
                others = self.frequencies[family].sum() - self.frequencies[family]
                corrections[family] = (1 + others / above) / above
        return corrections

    def sample(self, rows: int, rng: np.random.Generator) -> tuple[np.ndarray, sp.csr_matrix]:
        """Hidden states (rows, dim) float32, and their activations (rows, features)."""
        hidden = []
        activations = []
        for start in range(0, rows, ROWS_AT_ONCE):
            drawn = self._activations(min(ROWS_AT_ONCE, rows - start), rng)
            activations.append(sp.csr_matrix(drawn))
            hidden.append((drawn @ self.vectors + self.bias).astype(np.float32))
        return np.concatenate(hidden), sp.vstack(activations, format="csr")

    def _activations(self, rows: int, rng: np.random.Generator) -> np.ndarray:
        shape = (rows, self.recipe.features)
        gaussian = rng.normal(size=(rows, self.recipe.rank)) @ self._factor.T + rng.normal(size=shape) * self._noise
        sizes = np.maximum(0, self.means + rng.normal(size=shape) * self.deviations)
        activations = np.where(gaussian > self._thresholds, sizes, 0)
        for families in self.families:
            children = families.ravel()
            above = self.parents[children]
            activations[:, children] *= activations[:, above] / self.means[above]
            grouped = activations[:, children].reshape(rows, *families.shape)
            winners = (rng.random(grouped.shape) * (grouped > 0)).argmax(axis=2)
            wins = np.arange(families.shape[1]) == winners[:, :, None]
            activations[:, children] = (grouped * wins).reshape(rows, -1)
        return activations


def zipf_frequencies(recipe: Recipe) -> np.ndarray:
    """The frequencies (features,), from ``most`` to ``least``."""
    shape = np.arange(1, recipe.features + 1.0) ** -recipe.exponent
    return recipe.least + (recipe.most - recipe.least) * (shape - shape[-1]) / (shape[0] - shape[-1])


def trees(recipe: Recipe) -> tuple[np.ndarray, list[np.ndarray]]:
    """The parent of each feature (-1 for none), and the siblings of each depth from 1 on, ``(families, branching)``.

    Raises:
        ValueError: the trees have more nodes than there are features.
    """
    parents = np.full(recipe.features, -1)
    families = []
    above = np.arange(recipe.roots)
    next_feature = recipe.roots
    for _ in range(recipe.depth):
        count = len(above) * recipe.branching
        if next_feature + count > recipe.features:
            raise ValueError(f"{recipe.features} features are too few for these trees; use fewer roots or less depth")
        children = np.arange(next_feature, next_feature + count)
        parents[children] = np.repeat(above, recipe.branching)
        families.append(children.reshape(-1, recipe.branching))
        above = children
        next_feature = next_feature + count
    return parents, families


def spread_out(vectors: np.ndarray, steps: int = 100, rate: float = 0.05) -> np.ndarray:
    """Unit rows after some steps of gradient descent on the sum of the squared cosines of all pairs."""
    for _ in range(steps):
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        cosines = vectors @ vectors.T
        np.fill_diagonal(cosines, 0)
        vectors = vectors - rate * cosines @ vectors
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
