"""Hidden states that an auxiliary model computes for the masked tokens of a batch, without a store."""

from torch import Tensor

from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceEncoder, HuggingFaceSource, check_positions
from mlsm_plugin.huggingface.collators import NO_TOKEN


class AuxiliaryStates:
    """The hidden states of an auxiliary model, which moves to the device of the first batch.

    It is not trained, and not a part of the model that learns from it. ValueError if ``encoder`` is not a
    :class:`HuggingFaceEncoder`.
    """

    def __init__(self, encoder: HuggingFaceEncoder) -> None:
        if not isinstance(encoder, HuggingFaceEncoder):
            raise ValueError(
                f"the auxiliary model is a {type(encoder).__name__}; pass HuggingFaceEncoder(FOLDER, layer=N), where N "
                "is the number of the hidden state"
            )
        self.encoder = encoder

    def of_places(self, ids: Tensor, places: Tensor) -> Tensor:
        """Hidden states ``(n, dim)`` float32 at the ``places`` ``(n,)`` in the flattened ``ids`` ``(B, T)``.

        The two are the ``auxiliary`` entry of a batch. ValueError if the sequences are longer than the auxiliary model
        can read.
        """
        encoder = self.encoder
        check_positions(ids.size(1), encoder.max_tokens, "a sequence for the auxiliary model")
        if encoder.device != ids.device:
            encoder.to(ids.device)
        hidden = encoder.hidden_states(ids.masked_fill(ids == NO_TOKEN, encoder.pad))
        return hidden.flatten(0, 1)[places]

    def record(self) -> dict[str, object]:
        """What decides the hidden states: SHA-256 of the model, and the layer."""
        return {
            "auxiliary model": HuggingFaceSource.fingerprint_of(self.encoder.folder)[:12],
            "layer of the auxiliary model": self.encoder.layer,
        }
