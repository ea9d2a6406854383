"""Random weights of a sparse autoencoder."""

from __future__ import annotations

import torch

from mlsm_plugin.core.sparse_coding.sparse_autoencoder import SaeConfig, SaeWeights, tensors_of


def random_weights(config: SaeConfig, num_atoms: int, dim: int, seed: int = 0) -> SaeWeights:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"encoder": (num_atoms, dim), "decoder": (num_atoms, dim), "decoder_bias": (dim,)}
    return SaeWeights(
        **{name: torch.randn(shapes.get(name, (num_atoms,)), generator=generator) for name in tensors_of(config)}
    )
