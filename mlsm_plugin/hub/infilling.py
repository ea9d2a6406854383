"""Fill the gaps of a text with a trained denoising model."""

from typing import Any

import torch
from fairseq.data import encoders
from torch import Tensor

from mlsm_plugin.core.masking.span_corruption import filled
from mlsm_plugin.core.text.infilled_text import Filler, Infilling, check_has_gap, check_search, sentinel_symbols
from mlsm_plugin.core.text.unknown_tokens import MAX_UNK_RATE_OF_A_TEXT, check_known
from mlsm_plugin.fairseq_plugin.compat.model_parts import best_hypothesis
from mlsm_plugin.fairseq_plugin.text.masked_text import encode_with_sentinels


class DenoisingHubInterface(torch.nn.Module):
    """A loaded model of ``span_denoising`` with its tokenizer; see :func:`mlsm_plugin.hub.from_pretrained`."""

    max_unk_rate = MAX_UNK_RATE_OF_A_TEXT  # largest share of a text that may be unknown to infill()

    def __init__(self, cfg: Any, task: Any, model: Any) -> None:
        super().__init__()
        self.cfg = cfg
        self.task = task
        self.model = model
        self.bpe = encoders.build_bpe(cfg.bpe)
        self.dictionary = task.source_dictionary
        self.sentinels = task.sentinels.tolist()

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        device: torch.device = next(self.model.parameters()).device
        return device

    def encode(self, text: str) -> Tensor:
        """Ids ``(T,)`` of a text with sentinels, with EOS.

        ValueError if the text has a sentinel that the model lacks, has a sentinel twice, or is too long for the model.
        """
        ids = encode_with_sentinels(text, self.bpe, self.dictionary, len(self.sentinels))
        limit = int(self.model.encoder.max_positions())
        if len(ids) + 1 > limit:
            raise ValueError(f"the text has {len(ids) + 1} tokens, the model takes at most {limit}")
        return torch.tensor([*ids, self.dictionary.eos()])

    def decode(self, ids: Any) -> str:
        """The text of ids, without EOS and with sentinels."""
        words: list[str] = []
        symbols: list[str] = []
        known = set(sentinel_symbols(len(self.sentinels)))
        for symbol in [self.dictionary[int(token)] for token in ids if int(token) != self.dictionary.eos()]:
            if symbol in known:
                words += [self._joined(symbols), symbol]
                symbols = []
            else:
                symbols.append(symbol)
        return " ".join(word for word in [*words, self._joined(symbols)] if word)

    def _joined(self, symbols: list[str]) -> str:
        return str(self.bpe.decode(" ".join(symbols))).strip()

    @torch.no_grad()
    def infill(self, text: str, beam: int = 4, *, max_length: int | None = None) -> Infilling:
        """Fill the gaps of a text such as ``"The <extra_id_0> walks in <extra_id_1> park"``, by beam search.

        ``max_length`` is the longest target in tokens; None: as long as the model's positions allow. ValueError if the
        text has no sentinel, is too long, has too many unknown tokens, or as for :meth:`encode`, or a number is not
        positive.
        """
        check_search(beam, max_length)
        source = self.encode(text)
        check_known([text], self.bpe, self.dictionary, self.max_unk_rate)
        check_has_gap([token for token in source.tolist() if token in set(self.sentinels)], text)
        limit = int(self.model.decoder.max_positions()) - 1
        target, scores = best_hypothesis(
            self.task, self.model, source.to(self.device), beam=beam, max_length=min(max_length or limit, limit)
        )
        return self._filled(source.tolist(), target, scores)

    def _filled(self, source: list[int], target: list[int], scores: list[float]) -> Infilling:
        whole, filled_gaps = filled(source, target, scores, sentinels=self.sentinels, eos=self.dictionary.eos())
        fillers = [
            Filler(self.dictionary[token], self._joined([self.dictionary[number] for number in ids]), score)
            for token, ids, score in filled_gaps
        ]
        return Infilling(self.decode(whole), tuple(fillers), self.decode(target))
