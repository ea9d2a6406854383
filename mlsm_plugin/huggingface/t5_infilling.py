"""Fill the gaps of a text with a stock T5 (v1.0 or v1.1, also after further training); needs no fairseq."""

import torch
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.hf_files import hf_folder
from mlsm_plugin.core.hidden_states.hf_encoder import check_vocabulary, load_library_model, supported_config
from mlsm_plugin.core.masking.span_corruption import filled
from mlsm_plugin.core.text.hf_tokenizer import load_fast_tokenizer, number_of_ids
from mlsm_plugin.core.text.infilled_text import (
    Filler,
    Infilling,
    check_has_gap,
    check_search,
    sentinel_symbols,
    sentinels_in,
)
from mlsm_plugin.core.text.text_files import check_text
from mlsm_plugin.core.text.unknown_tokens import MAX_UNK_RATE_OF_A_TEXT, UnknownTokens

LONGEST_TARGET = 512  # as in the training of T5


class T5Infiller:
    """A ``T5ForConditionalGeneration`` with its tokenizer, in eval mode, from a folder or hub name.

    ValueError if it is not a T5, its weights cannot be read, or its tokenizer has no ``<extra_id_0>`` or has more ids
    than the model has embeddings.
    """

    max_unk_rate = MAX_UNK_RATE_OF_A_TEXT  # largest share of unknown text that infill() accepts

    def __init__(self, name: PathLike) -> None:
        folder = hf_folder(name, weights=True)
        self.model = (
            load_library_model(folder, supported_config(folder, ["t5"]), "T5ForConditionalGeneration").float().eval()
        )
        self.tokenizer = load_fast_tokenizer(folder)
        self.largest_id = number_of_ids(self.tokenizer) - 1
        check_vocabulary(self, self.model.get_input_embeddings().num_embeddings, folder)
        vocabulary = self.tokenizer.get_vocab()
        number = next(n for n in range(len(vocabulary) + 1) if f"<extra_id_{n}>" not in vocabulary)
        if number == 0:
            raise ValueError(f"the tokenizer of {folder} has no <extra_id_0>; use the tokenizer of a T5")
        self.sentinels = [vocabulary[symbol] for symbol in sentinel_symbols(number)]

    def to(self, device: str | torch.device) -> None:
        """Move the model to ``device``."""
        self.model.to(device)

    @torch.no_grad()
    def infill(self, text: str, beam: int = 4, *, max_length: int | None = None) -> Infilling:
        """Fill the gaps of a text such as ``"The <extra_id_0> walks in <extra_id_1> park"``, by beam search.

        ``max_length`` is the longest target in tokens; None: 512. The search also ends at the sentinel that follows the
        last sentinel of the text. ValueError if the text has no sentinel, repeats one, or has one that the tokenizer
        lacks; if it names a token that ends or pads texts, such as ``</s>``; if too much of it is unknown; or if a
        number is not positive. Unknown text becomes ``<unk>`` in the filled text, and causes a warning.
        """
        check_search(beam, max_length)
        check_text(text)
        sentinels = sentinels_in(text, len(self.sentinels))
        check_has_gap(sentinels, text)
        source = self._encoded(text)
        gaps = [self.tokenizer.convert_tokens_to_ids(symbol) for symbol in sentinels]
        closing = self.sentinels[max(map(self.sentinels.index, gaps)) + 1 :][:1]
        generated = self.model.generate(
            source[None].to(self.model.device),
            num_beams=beam,
            do_sample=False,
            max_new_tokens=max_length or LONGEST_TARGET,
            eos_token_id=[self.tokenizer.eos_token_id, *closing],
            num_return_sequences=1,  # overrides the generation_config.json of the folder
            return_dict_in_generate=False,
        )
        target = generated[:, 1:]  # without the start token
        logits = self.model(input_ids=source[None].to(self.model.device), labels=target).logits.float()
        scores = logits.log_softmax(dim=-1).gather(2, target[..., None])[0, :, 0].tolist()
        return self._filled(source.tolist(), target[0].tolist(), scores)

    def _encoded(self, text: str) -> Tensor:
        """Ids ``(T,)`` of the text, EOS included; ValueError if the text names a token that ends or pads texts."""
        encoding = self.tokenizer(text, return_offsets_mapping=True)
        ids = encoding["input_ids"]
        offsets = encoding["offset_mapping"]
        for token, (start, stop) in zip(ids, offsets, strict=True):
            if stop > start and token in (self.tokenizer.eos_token_id, self.tokenizer.pad_token_id):
                raise ValueError(
                    f"the text contains {text[start:stop].strip()}, which the tokenizer reads as a special token that "
                    "ends or pads a text; take it out, or write it in another way"
                )
        unknown = UnknownTokens()
        unknown.add(text, ids, offsets, self.tokenizer.unk_token_id)
        unknown.check("the text", self.max_unk_rate, remedy="use a model that knows such text")
        unknown.warn("the text")
        return torch.tensor(ids)

    def _filled(self, source: list[int], target: list[int], scores: list[float]) -> Infilling:
        whole, gaps = filled(source, target, scores, sentinels=self.sentinels, eos=self.tokenizer.eos_token_id)
        fillers = [
            Filler(self.tokenizer.convert_ids_to_tokens(token), self._text(ids), score) for token, ids, score in gaps
        ]
        return Infilling(self._text(whole), tuple(fillers), self._text(target))

    def _text(self, ids: list[int]) -> str:
        """The text of ids, including special tokens, except those that end and pad texts."""
        ids = [token for token in ids if token not in (self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)]
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)).strip()
