"""The fairseq task of masked latent semantic modeling (Berend, ACL Findings 2023)."""

import logging
import os
from dataclasses import dataclass
from typing import Optional

from fairseq import utils
from fairseq.criterions import FairseqCriterion
from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import BaseFairseqModel
from fairseq.optim import FairseqOptimizer
from fairseq.tasks import register_task

from mlsm_plugin.core.files.settings import option
from mlsm_plugin.core.masking.masked_share import MaskReplacement, check_usable_share, samples_to_look_at
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.stored_codes import check_same_codes, check_top, origin_of, recorded_coverage
from mlsm_plugin.fairseq_plugin.coding.online_codes import OnlineCodes
from mlsm_plugin.fairseq_plugin.compat import version_shims
from mlsm_plugin.fairseq_plugin.compat.batches import Sample
from mlsm_plugin.fairseq_plugin.compat.binarized_files import combined_splits
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import CheckpointState
from mlsm_plugin.fairseq_plugin.compat.training_options import NO_LATENT_HEAD
from mlsm_plugin.fairseq_plugin.data.token_blocks import check_codes_belong_to, check_is_coded, split_path
from mlsm_plugin.fairseq_plugin.data.token_datasets import (
    NO_POSITION,
    CoveredMaskTokensDataset,
    MaskedCodesDataset,
    SplitCoverage,
    TokenPositionsDataset,
)
from mlsm_plugin.fairseq_plugin.tasks.base_masked_lm import BaseMaskedLMConfig, BaseMaskedLMTask
from mlsm_plugin.fairseq_plugin.tasks.plugin_task import StepResult

logger = logging.getLogger(__name__)

# options that only one source of codes reads
OPTIONS_OF = {
    "online": ("auxiliary_checkpoint", "latent_dictionary", "latent_layer", "latent_lambda", "auxiliary_fp16"),
    "store": ("latent_codes",),
}
FEW_CODES = "a smaller --lambda of `mlsm dictionary` and `mlsm encode` leaves fewer tokens without one"


@dataclass
class MaskedLatentSemanticConfig(BaseMaskedLMConfig):
    """The options of ``masked_lm``, and of the source of the codes."""

    latent_source: ChoiceEnum(["store", "online"]) = option(  # type: ignore[valid-type]
        "store",
        help="store: read the codes that `mlsm encode` wrote; online: compute the codes of the masked tokens "
        "in every step, with --auxiliary-checkpoint and --latent-dictionary",
    )
    # fairseq understands typing.Optional, but not `str | None`
    latent_codes: Optional[str] = option(  # noqa: UP045
        None, help="store: folder of the codes, <split>.codes (default: the data; A:B for several datasets)"
    )
    auxiliary_checkpoint: Optional[str] = option(None, help="online: checkpoint of the auxiliary model, or hf:PATH")  # noqa: UP045
    latent_dictionary: Optional[str] = option(None, help="online: folder that `mlsm dictionary` wrote")  # noqa: UP045
    latent_layer: Optional[int] = option(  # noqa: UP045
        None, help="online: hidden state of the auxiliary model, by number (default: the dictionary's)"
    )
    latent_lambda: Optional[float] = option(None, help="online: weight of the L1 penalty (default: the dictionary's)")  # noqa: UP045
    latent_top: Optional[int] = option(None, help="keep the N strongest atoms of each code (default: all)")  # noqa: UP045
    auxiliary_fp16: bool = option(
        False,
        help="online: run the auxiliary model in float16, on a CPU with products in bfloat16. By default its products "
        "are in bfloat16 if the device is fast in it; codes then differ from those in float32 by rounding",
    )


@register_task("masked_latent_semantic", dataclass=MaskedLatentSemanticConfig)
class MaskedLatentSemanticTask(BaseMaskedLMTask):
    """Masked LM whose batches also carry the sparse codes of the masked tokens.

    A batch is a batch of ``masked_lm`` plus ``codes``, see :class:`MaskedCodesDataset`. They are read from
    ``DATA/<split>.codes`` or another folder (``--latent-codes``). If they cover only a share of the positions, only
    these positions are masked. With ``--latent-source online`` each step computes the codes of its masked tokens.
    """

    cfg: MaskedLatentSemanticConfig
    criterions = ("latent_semantic_kl", "masked_lm")

    def __init__(self, cfg: MaskedLatentSemanticConfig, dictionary: Dictionary) -> None:
        super().__init__(cfg, dictionary)
        check_top(cfg.latent_top)
        self._stores: dict[tuple[str, ...], CodeStore] = {}
        self._checked_codes: set[str] = set()
        self._origin: tuple[str, dict[str, object]] | None = None  # a store, and the settings that decide its codes
        self._online: OnlineCodes | None = None
        self._atoms_of_model: int | None = None
        self._without_latent_head = False
        self._reads_codes = False
        self._online_is_checked = False
        self._all_codes_are_checked = False

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False) -> BaseFairseqModel:
        """Build the model. Without ``num_atoms`` in ``cfg``, it gets an atom logit for each atom of the codes.

        ValueError if an option is set that the source of the codes does not read.
        """
        for source, names in OPTIONS_OF.items():
            values = {name: getattr(self.cfg, name) for name in names}
            set_options = [name for name, value in values.items() if value is not None and value is not False]
            if set_options and source != str(self.cfg.latent_source) and not from_checkpoint:
                flags = ", ".join(f"--{name.replace('_', '-')}" for name in set_options)
                raise ValueError(f"{flags}: only --latent-source {source} reads this")
        if getattr(cfg, "num_atoms", None) is None:
            with version_shims.open_config(cfg):
                cfg.num_atoms = self._num_atoms()
        self._atoms_of_model = cfg.num_atoms
        model = super().build_model(cfg, from_checkpoint)
        self._without_latent_head = type(model).__module__.partition(".")[0] == "fairseq"
        return model

    def build_criterion(self, cfg: FairseqDataclass, *args: object, **kwargs: object) -> FairseqCriterion:
        """Build the criterion; ValueError if it belongs to another task, or needs a latent head and there is none."""
        criterion = super().build_criterion(cfg, *args, **kwargs)
        self._reads_codes = getattr(criterion, "latent_weight", 0) > 0
        if self._without_latent_head and self._reads_codes:
            raise ValueError(NO_LATENT_HEAD)
        return criterion

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: object) -> None:
        """Load the samples of ``masked_lm``, with its masks and order, plus the codes of the masked tokens."""
        if self._computes_codes:
            self._online_codes().load_encoder()  # reports errors before the first batch
            self._check_atoms(self._online_codes().coder.num_atoms, str(self.cfg.latent_dictionary))
            self.state.merge_state_dict(origin_of(self._online_codes().meta, self.cfg.latent_top))
            super().load_dataset(split, epoch=epoch, combine=combine, **kwargs)
            return
        samples = self.load_samples(split, epoch, combine)
        path = split_path(self.cfg.data, split, epoch)
        folder = os.path.dirname(split_path(self._codes_data, split, epoch))
        store = self._open_codes(combined_splits(path) if combine else [path], folder)
        coverages = [
            SplitCoverage(meta["token_count"], *recorded_coverage(meta, directory))
            for directory, meta in zip(store.directories, store.metas, strict=True)
        ]
        self._check_masks_fit(split, store, coverages)
        positions = self.samples_of(TokenPositionsDataset(self.tokens.sizes), split, bos=NO_POSITION)
        if any(part.coverage < 1 for part in coverages):
            cfg = self.cfg
            inputs, targets = CoveredMaskTokensDataset.apply_mask(
                samples,
                positions,
                coverages,
                self.mask_prob_of(split),
                self.source_dictionary,
                seed=cfg.seed,
                replacement=MaskReplacement(
                    leave_unmasked_prob=cfg.leave_unmasked_prob, random_token_prob=cfg.random_token_prob
                ),
                freq_weighted_replacement=cfg.freq_weighted_replacement,
            )
        else:
            inputs, targets = self.masked(samples, split)
        codes = MaskedCodesDataset(positions, targets, store, self.source_dictionary.pad(), self.cfg.latent_top)
        if self._reads_codes:
            self._check_coded(split, codes)
        self.set_batches(split, samples, inputs, targets, codes=codes)

    def _check_coded(self, split: str, codes: MaskedCodesDataset) -> None:
        """Warn if many masked tokens have no code (the latent loss skips them); ValueError if nearly all have none."""
        rows = (codes[index] for index in samples_to_look_at(len(codes)))
        counts = ((codes.collater([of_sample])["number"], len(of_sample)) for of_sample in rows)
        check_usable_share(f"masked tokens of {split} have a code", counts, remedy=FEW_CODES)

    def _check_masks_fit(self, split: str, store: CodeStore, coverages: list[SplitCoverage]) -> None:
        """Check that the options allow masks only at coded positions, and log how these are drawn."""
        cfg = self.cfg
        mask_prob = self.mask_prob_of(split)
        needs_all_positions = {
            "--mask-whole-words": cfg.mask_whole_words,
            "--mask-multiple-length above 1": cfg.mask_multiple_length > 1,
            "--mask-stdev above 0": cfg.mask_stdev > 0,
            "--skip-masking": cfg.skip_masking,
        }
        for directory, part in zip(store.directories, coverages, strict=True):
            if part.coverage == 1:
                continue
            flags = [flag for flag, is_set in needs_all_positions.items() if is_set]
            if flags:
                raise ValueError(
                    f"{flags[0]} needs codes of all positions, but {directory} covers {part.coverage} of them; "
                    "run `mlsm encode` without --coverage, or leave that option out"
                )
            if mask_prob > part.coverage:
                raise ValueError(
                    f"masking {mask_prob} of the positions is more than the {part.coverage} that {directory} covers; "
                    f"run `mlsm encode --coverage` with at least {mask_prob}, or pass a smaller --mask-prob (in "
                    "validation: --valid-mask-prob)"
                )
            logger.info(
                "%s covers %g of the positions (seed %d): masks are drawn among those only, each with probability "
                "%.4g, so a share of %g of the content tokens is masked, as with full coverage",
                directory,
                part.coverage,
                part.seed,
                mask_prob / part.coverage,
                mask_prob,
            )

    def begin_epoch(self, epoch: int, model: BaseFairseqModel) -> None:
        """See :meth:`PluginTask.begin_epoch`; ValueError if another folder of the data has no codes that fit."""
        super().begin_epoch(epoch, model)
        if not self._computes_codes and not self._all_codes_are_checked:
            self._all_codes_are_checked = True
            self._check_all_codes()

    def _check_all_codes(self) -> None:
        """Open the codes of all folders (``A:B``), so that a later folder does not stop the run in its epoch."""
        number = max(len(utils.split_paths(data)) for data in (self.cfg.data, self._codes_data))
        for epoch in range(1, number + 1):
            path = split_path(self.cfg.data, self.cfg.train_subset, epoch)
            folder = os.path.dirname(split_path(self._codes_data, self.cfg.train_subset, epoch))
            self._open_codes(combined_splits(path), folder)

    def train_step(
        self,
        sample: Sample,
        model: BaseFairseqModel,
        criterion: FairseqCriterion,
        optimizer: FairseqOptimizer,
        update_num: int,
        ignore_grad: bool = False,
    ) -> StepResult:
        """See :meth:`PluginTask.train_step`; the criterion learns the number of updates first."""
        if hasattr(criterion, "set_num_updates"):
            criterion.set_num_updates(update_num)
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)

    def prepare_batch(self, sample: Sample, criterion: FairseqCriterion, update_num: int | None) -> Sample:
        """The batch also gets codes if they are computed online and ``criterion`` reads them."""
        sample = super().prepare_batch(sample, criterion, update_num)
        if not self._computes_codes or not getattr(criterion, "latent_weight", 0) > 0:
            return sample
        codes = self._online_codes().codes_of_masked(sample["net_input"]["src_tokens"], sample["target"])
        if not self._online_is_checked:
            self._online_is_checked = True
            coded = (codes["weights"] > 0).any(dim=1)
            check_usable_share("masked tokens of a batch have a code", [(coded.sum(), len(coded))], remedy=FEW_CODES)
        return {**sample, "codes": codes}

    @property
    def _computes_codes(self) -> bool:
        return str(self.cfg.latent_source) == "online"

    def _online_codes(self) -> OnlineCodes:
        """The object that computes codes, made on first use, so that a checkpoint loads without the auxiliary model."""
        if self._online is None:
            for name in ("auxiliary_checkpoint", "latent_dictionary"):
                if not getattr(self.cfg, name):
                    raise ValueError(f"--latent-source online needs --{name.replace('_', '-')}")
            self._online = OnlineCodes(
                utils.split_paths(self.cfg.data)[0],
                checkpoint=self.cfg.auxiliary_checkpoint or "",
                dictionary=self.cfg.latent_dictionary or "",
                layer=self.cfg.latent_layer,
                coder_options={} if self.cfg.latent_lambda is None else {"lambda_": self.cfg.latent_lambda},
                fp16=self.cfg.auxiliary_fp16 or None,
                latent_top=self.cfg.latent_top,
                tokens_per_sample=self.cfg.tokens_per_sample,
            )
        return self._online

    @property
    def _codes_data(self) -> str:
        """The folder of the codes, or several that alternate with the folders of the data (``A:B``)."""
        return self.cfg.latent_codes or self.cfg.data

    def _open_codes(self, splits: list[str], folder: str) -> CodeStore:
        directories = [os.path.join(folder, f"{os.path.basename(split)}.codes") for split in splits]
        for split, directory in zip(splits, directories, strict=True):
            check_is_coded(split, directory)
        store = self._store(*directories)
        for split, directory, meta in zip(splits, directories, store.metas, strict=True):
            if directory not in self._checked_codes:
                check_codes_belong_to(split, meta, directory)
                origin = origin_of(meta, self.cfg.latent_top)
                if self._origin is None:
                    self._origin = (directory, origin)
                first, expected = self._origin
                remedy = "encode both with the same dictionary and options"
                check_same_codes(expected, origin, f"the codes in {directory}", f"those in {first}", remedy)
                self.state.merge_state_dict(origin)
                self._check_atoms(store.num_atoms, directory)
                self._checked_codes.add(directory)
        return store

    def _store(self, *directories: str) -> CodeStore:
        """The codes in these folders, opened once."""
        if directories not in self._stores:
            self._stores[directories] = CodeStore(directories)
        return self._stores[directories]

    def _check_atoms(self, num_atoms: int, where: str) -> None:
        if self._atoms_of_model is not None and num_atoms > self._atoms_of_model:
            flag = f"--num-atoms {self._atoms_of_model}"
            raise ValueError(f"{flag} is less than the {num_atoms} atoms of {where}; leave that option out")

    def check_resumes(self, saved: CheckpointState) -> None:
        """Raise ValueError if a run resumes with other codes than its state ``saved`` records."""
        codes_of_run = "those that the run in the checkpoint began with"
        remedy = "pass another --save-dir, or those codes"
        check_same_codes(saved, self.state_dict(), "the codes", codes_of_run, remedy)

    def _num_atoms(self) -> int:
        if self._computes_codes:
            return self._online_codes().coder.num_atoms
        splits = dict.fromkeys((self.cfg.train_subset, "train", "valid"))
        directories = [f"{split_path(self._codes_data, split, 1)}.codes" for split in splits]
        for directory in directories:
            if os.path.isdir(directory):
                return self._store(directory).num_atoms
        raise FileNotFoundError(
            f"{self._codes_data} has no codes ({', '.join(map(os.path.basename, directories))}); write them with "
            "`mlsm encode`"
        )
