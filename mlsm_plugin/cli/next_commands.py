"""The next command of the pipeline, ready to paste; a command prints it at its end."""

import json
import shlex
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.text.text_files import read_text

if TYPE_CHECKING:
    from mlsm_plugin.core.coding.split_coder import CodingSettings


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

    A folder of sentence-transformers is opened with this library; otherwise a vector is a mean of hidden states.
    """
    first, second = map(_literal, example_sentences(text))
    if is_sentence_transformer:
        model_of = f"model = SentenceTransformer({_literal(model)})"
        vectors = f"model.encode([{first}]), model.encode([{second}])"
        return _python(
            f"from sentence_transformers import SentenceTransformer; {model_of}; print(model.similarity({vectors}))"
        )
    encode = f'encode = pipeline("feature-extraction", {_literal(model)}, return_tensors=True)'
    vectors = f"encode({first})[0].mean(0), encode({second})[0].mean(0)"
    return _python(
        f"import torch; from transformers import pipeline; {encode}; print(torch.cosine_similarity({vectors}, dim=0))"
    )


def example_sentences(text: PathLike) -> Sequence[str]:
    """Two sentences of 5 to 15 words of a text, or two general ones if it has none."""
    fitting = (line for line in read_text([text]) if 5 <= len(line.split()) <= 15 and line.isprintable())
    sentences = list(islice(fitting, 2)) if Path(text).exists() else []
    return sentences if len(sentences) == 2 else EXAMPLES


def _literal(value: PathLike) -> str:
    """A string as Python writes it, in double quotes."""
    return json.dumps(str(value), ensure_ascii=False)


def _python(code: str) -> str:
    return shlex.join(["python", "-c", code])


def encode_command(data_bin: PathLike, auxiliary: str, dictionary: PathLike, user_dir: str | None = None) -> str:
    """The ``mlsm encode`` command for the arguments of ``mlsm dictionary``."""
    words = ["mlsm", "encode", str(data_bin), "--auxiliary", auxiliary, "--dictionary", str(dictionary)]
    return shlex.join(words + (["--user-dir", user_dir] if user_dir else []))


def training_command(
    data_bin: PathLike, save_dir: PathLike, coding: "CodingSettings", user_dir: str | None, *, codes: str | None = None
) -> str:
    """The ``fairseq-train`` command that trains MLSM and MLM together on a dataset with these codes.

    ``codes`` is the folder of the codes, if that is not the dataset.
    """
    from mlsm_plugin.fairseq_plugin.compat.version_shims import PACKAGE_DIR
    from mlsm_plugin.fairseq_plugin.pipelines.pretraining import MASKS, as_flags  # needs fairseq

    where = f" --latent-codes {shlex.quote(codes)}" if codes else ""
    masks = " ".join(as_flags(MASKS)) if coding.coverage >= MASKS["mask_prob"] else ""
    return f"""fairseq-train {shlex.quote(str(data_bin))} --user-dir {shlex.quote(user_dir or PACKAGE_DIR)}{where} \\
    --task masked_latent_semantic --criterion latent_semantic_kl --mlm-weight 1 --arch mlsm_modern_small \\
    --sample-break-mode {coding.blocks.sample_break_mode} --tokens-per-sample {coding.blocks.tokens_per_sample} \\
    {masks} --optimizer muon --adam-betas '(0.9, 0.98)' --adam-eps 1e-6 --weight-decay 0.01 --clip-norm 1.0 \\
    --autocast auto --lr-scheduler polynomial_decay --lr 1e-3 --warmup-updates 1000 --total-num-update 100000 \\
    --max-update 100000 --batch-size 32 --log-format simple --log-interval 100 \\
    --no-epoch-checkpoints --save-interval-updates 5000 --keep-interval-updates 1 \\
    --save-dir {shlex.quote(str(save_dir))}"""
