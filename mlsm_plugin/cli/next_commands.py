"""The next command of the pipeline, ready to paste; commands print it when they end."""

import json
import shlex
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.sentence_modules import CLS, pooling_of
from mlsm_plugin.core.hidden_states.settings import BlockSettings
from mlsm_plugin.core.text.text_files import read_text

if TYPE_CHECKING:
    from mlsm_plugin.core.coding.split_coder import CodingSettings

BLOCKS = BlockSettings(128, "none")  # for plain masked LM: full sequences, without padding
EXAMPLES = ("This is a short example sentence.", "Here is another sentence, which is longer.")


def print_next(purpose: str, command: str) -> None:
    """Print ``command``, introduced by its ``purpose``."""
    print(f"\n{purpose}:\n\n{command}")


def filling_command(model: PathLike, text: PathLike) -> str:
    """The command that fills a gap in a sentence of ``text`` with a masked LM, and prints the guesses."""
    from mlsm_plugin.core.text.hf_tokenizer import load_fast_tokenizer

    sentence, _ = example_sentences(text)
    words = sentence.split()
    words[words.index(max(words, key=len))] = load_fast_tokenizer(Path(model)).mask_token
    call = f'pipeline("fill-mask", {_literal(model)})({_literal(" ".join(words))})'
    return _python(f'from transformers import pipeline; print(*(guess["sequence"] for guess in {call}), sep="\\n")')


def similarity_command(model: PathLike, text: PathLike, *, is_sentence_transformer: bool) -> str:
    """The command that prints the cosine of the vectors of two sentences of ``text``.

    The command opens a sentence-transformers folder with that library; otherwise, a vector is a mean of hidden states,
    or the first of them, if the folder says so.
    """
    first, second = map(_literal, example_sentences(text))
    if is_sentence_transformer:
        model_of = f"model = SentenceTransformer({_literal(model)})"
        vectors = f"model.encode([{first}]), model.encode([{second}])"
        return _python(
            f"from sentence_transformers import SentenceTransformer; {model_of}; print(model.similarity({vectors}))"
        )
    encode = f'encode = pipeline("feature-extraction", {_literal(model)}, return_tensors=True)'
    pooled = "[0, 0]" if pooling_of(Path(model)) == CLS else "[0].mean(0)"
    vectors = f"encode({first}){pooled}, encode({second}){pooled}"
    return _python(
        f"import torch; from transformers import pipeline; {encode}; print(torch.cosine_similarity({vectors}, dim=0))"
    )


def example_sentences(text: PathLike) -> Sequence[str]:
    """Two sentences of 5 to 15 words from a text, or two fixed sentences if it has fewer."""
    suitable = (line for line in read_text([text]) if 5 <= len(line.split()) <= 15 and line.isprintable())
    try:
        sentences = list(islice(suitable, 2))
    except (OSError, ValueError):  # no text, or only blank lines
        return EXAMPLES
    return sentences if len(sentences) == 2 else EXAMPLES


def _literal(value: PathLike) -> str:
    """A Python string literal in double quotes."""
    return json.dumps(str(value), ensure_ascii=False)


def _python(code: str) -> str:
    return shlex.join(["python", "-c", code])


def encode_command(data_bin: PathLike, auxiliary: str, dictionary: PathLike, user_dir: str | None = None) -> str:
    """The ``mlsm encode`` command for the arguments of ``mlsm dictionary``."""
    words = ["mlsm", "encode", str(data_bin), "--auxiliary", auxiliary, "--dictionary", str(dictionary)]
    return shlex.join(words + (["--user-dir", user_dir] if user_dir else []))


def masked_lm_command(data_bin: PathLike, save_dir: PathLike, tokens: int) -> str:
    """The ``fairseq-train`` command that trains plain masked LM on a dataset with this many training tokens."""
    from mlsm_plugin.fairseq_plugin.pipelines.training_recipe import PLAIN, TrainingPlan, shell_command, training_words

    plan = TrainingPlan(tokens, BLOCKS, PLAIN)
    return shell_command(training_words(data_bin, save_dir, plan))


def training_command(
    data_bin: PathLike,
    save_dir: PathLike,
    coding: "CodingSettings",
    auxiliary: str,
    user_dir: str | None = None,
    *,
    codes: str | None = None,
) -> str:
    """The ``fairseq-train`` command that trains MLSM and MLM together on a dataset with these codes.

    The trained model has the size and the weights of the ``auxiliary`` model, if that is an encoder of this package.
    ``codes`` is the folder of the codes, if it is not the dataset.
    """
    from mlsm_plugin.fairseq_plugin.pipelines.training_recipe import (
        TrainingPlan,
        continued,
        shell_command,
        tokens_in,
        training_words,
    )

    model, start = continued(auxiliary, coding.blocks)
    plan = TrainingPlan(
        tokens_in(data_bin), coding.blocks, model=model, start=start, coverage=coding.coverage, codes=codes
    )
    return shell_command(training_words(data_bin, save_dir, plan, user_dir=user_dir))
