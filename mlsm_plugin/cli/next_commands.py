"""The next command of the pipeline, ready to paste; a command prints it at its end."""

import shlex
from typing import TYPE_CHECKING

from mlsm_plugin.core.files.atomic_files import PathLike

if TYPE_CHECKING:
    from mlsm_plugin.core.coding.split_coder import CodingSettings


def print_next(purpose: str, command: str) -> None:
    """Print ``command``, introduced by its ``purpose``."""
    print(f"\n{purpose}:\n\n{command}")


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
