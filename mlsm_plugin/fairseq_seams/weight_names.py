"""Names of the weights in a checkpoint of fairseq's models."""

from __future__ import annotations

from collections.abc import Iterable

# of RoBERTa-like encoders
ENCODER = "encoder.sentence_encoder."
EMBEDDINGS = f"{ENCODER}embed_tokens.weight"
POSITIONS = f"{ENCODER}embed_positions.weight"
EMBEDDING_NORM = f"{ENCODER}layernorm_embedding"
LM_HEAD = "encoder.lm_head."
OUTPUT, OUTPUT_BIAS = f"{LM_HEAD}weight", f"{LM_HEAD}bias"
ATOM_PROJECTION = f"{LM_HEAD}atom_projection."  # of the latent head
LM_HEAD_PARTS = ("dense", "layer_norm")
# what has a row for each symbol of the dictionary
VOCABULARY_WEIGHTS = (EMBEDDINGS, OUTPUT, OUTPUT_BIAS)
LAYERS = f"{ENCODER}layers."
# of a layer; each has a weight and a bias
LAYER_PARTS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention output": "self_attn.out_proj",
    "attention norm": "self_attn_layer_norm",
    "widening": "fc1",
    "narrowing": "fc2",
    "output norm": "final_layer_norm",
}
# of encoder-decoders
SOURCE_EMBEDDINGS = "encoder.embed_tokens.weight"


def layer_numbers(names: Iterable[str]) -> list[int]:
    """Numbers of the layers, from 0, whose weights are among ``names``, ascending."""
    of_layers = [name.removeprefix(LAYERS) for name in names if name.startswith(LAYERS)]
    return sorted({int(name.split(".")[0]) for name in of_layers})
