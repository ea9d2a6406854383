"""The tokens that a Hugging Face masked LM predicts for the masks in a text."""

import threading
from pathlib import Path

import torch
from torch import Tensor

from mlsm_plugin.core.hidden_states.changed_states import changed_library_states
from mlsm_plugin.core.hidden_states.hf_encoder import load_masked_lm
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.huggingface.pretraining_model import head_of


class MaskedTokens:
    """A masked LM with a trained head; ValueError, with the reason, if the folder has none."""

    def __init__(self, folder: Path, tokenizer: HuggingFaceTokenizer, device: torch.device) -> None:
        model = load_masked_lm(folder)
        self._head = head_of(model)
        self._encoder = model.base_model.eval().to(device)
        model.to(device)
        self._tokenizer = tokenizer
        self._device = device
        self._running = threading.RLock()  # steering changes the model for all threads

    @torch.no_grad()
    def predicted(self, ids: list[int], count: int) -> list[list[tuple[str, float]]]:
        """For each mask among the ids of a text, the likeliest tokens except special tokens, with their probabilities.

        ``ids`` does not include the tokens that begin and end a text, and must fit into the positions of the model.
        """
        surrounded = torch.tensor(self._tokenizer.surrounded(ids))
        is_mask = surrounded.eq(self._mask_id)
        if not is_mask.any():
            return []
        with self._running:
            output = self._encoder(input_ids=surrounded[None].to(self._device), return_dict=True)
        hidden = output[0][0][is_mask.to(self._device)]
        probabilities = self._head.project(self._head.transform(hidden)).float().softmax(dim=1).cpu()
        return [self._likeliest(row, count) for row in probabilities]

    def steered(
        self, ids: list[int], count: int, *, layer: int, direction: Tensor, strength: float
    ) -> list[list[tuple[str, float]]]:
        """As :meth:`predicted`, with a direction added to hidden state ``layer`` of each of these ``ids``, masks too.

        ``direction`` ``(dim,)`` has unit length; what is added is ``strength`` times as long as the hidden state.
        """
        before = len(self._tokenizer.before)
        direction = direction.to(self._device)

        def change(hidden: Tensor) -> Tensor:
            changed = hidden.clone()
            of_text = changed[:, before : before + len(ids)]
            of_text += strength * of_text.norm(dim=-1, keepdim=True) * direction
            return changed

        with self._running, changed_library_states(self._encoder, layer, change):
            return self.predicted(ids, count)

    @property
    def _mask_id(self) -> int:
        assert self._tokenizer.mask_id is not None
        return self._tokenizer.mask_id

    def _likeliest(self, probabilities: Tensor, count: int) -> list[tuple[str, float]]:
        known = probabilities[: self._tokenizer.largest_id + 1].clone()  # embeddings may have rows without a token
        known[sorted(self._tokenizer.special_ids | {self._tokenizer.unknown_id})] = -1
        values, numbers = known.topk(min(count, len(known)))
        pairs = zip(numbers.tolist(), values.tolist(), strict=True)
        return [(self._text(number), value) for number, value in pairs if value >= 0]

    def _text(self, number: int) -> str:
        return self._tokenizer.backend.decode([number], skip_special_tokens=False).strip()
