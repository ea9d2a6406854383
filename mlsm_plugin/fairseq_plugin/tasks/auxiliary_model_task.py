"""The base of tasks whose batches carry what an auxiliary model computes of their text."""

# no `from __future__ import annotations`: fairseq reads the option types at run time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Optional

from fairseq import utils
from fairseq.dataclass import FairseqDataclass

from mlsm_plugin.core.files.settings import option
from mlsm_plugin.core.hidden_states.sources import alignment_of, source_of
from mlsm_plugin.fairseq_plugin.coding.auxiliary_model import AuxiliaryModel
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import CheckpointState
from mlsm_plugin.fairseq_plugin.compat.resumed_runs import LAST
from mlsm_plugin.fairseq_plugin.compat.training_options import registered_name
from mlsm_plugin.fairseq_plugin.tasks.base_masked_lm import BaseMaskedLMTask


@dataclass
class AuxiliaryModelConfig(FairseqDataclass):
    """The options of the auxiliary model."""

    # fairseq understands typing.Optional, but not `str | None`
    auxiliary_checkpoint: Optional[str] = option(  # noqa: UP045
        None, help="hf:PATH, for data of any tokenizer, or a checkpoint of fairseq with the vocabulary of the data"
    )
    auxiliary_fp16: bool = option(
        False,
        help="run the auxiliary model in float16, on a CPU with products in bfloat16. By default its products are in "
        "bfloat16 if the device is fast in it",
    )


class AuxiliaryModelTask(BaseMaskedLMTask):
    """A task with an auxiliary model, which stays the same when a run resumes."""

    computes: ClassVar[str]  # what the auxiliary model computes: the beginning of its keys in the state of the task
    same_auxiliary = True  # whether the checkpoint that is loaded was trained with what this run computes

    def open_auxiliary(self) -> None:
        """Read the auxiliary model, and record it; ValueError if it does not fit the data."""
        self.auxiliary.load_encoder()
        self.state.merge_state_dict(self.auxiliary_record())

    def auxiliary_record(self) -> dict[str, object]:
        """What decides the results of the auxiliary model; how it aligns only if it has another vocabulary."""
        checkpoint = self.auxiliary.checkpoint
        record = {"of": source_of(checkpoint).fingerprint_of(checkpoint), "layer": self.auxiliary.layer}
        if (alignment := alignment_of(checkpoint, self.auxiliary.data_bin)) is not None:
            record["alignment"] = alignment
        return {f"{self.computes}_{name}": value for name, value in record.items()}

    def check_starts_from(self, checkpoint: Path, saved: CheckpointState) -> None:
        """See :meth:`PluginTask.check_starts_from`; also note whether the auxiliary model is that of the checkpoint."""
        super().check_starts_from(checkpoint, saved)
        self.same_auxiliary = all(saved.get(name) == value for name, value in self.auxiliary_record().items())
        resumes = checkpoint.absolute() == Path(self.cfg.save_dir, LAST).absolute()
        if resumes and f"{self.computes}_of" in saved:
            self.check_resumes(saved)  # before weights of another width are loaded

    def check_resumes(self, saved: CheckpointState) -> None:
        """Raise ValueError if a run resumes with another auxiliary model or layer than its state ``saved`` records."""
        record = self.auxiliary_record()
        before = {name: saved.get(f"{self.computes}_{name}") for name in ("of", "layer", "alignment")}
        now = {name: record.get(f"{self.computes}_{name}") for name in before}
        if before["of"] is None:
            raise ValueError(
                f"the run did not begin with --task {registered_name(self.cfg)} and an auxiliary model; pass another "
                "--save-dir"
            )
        if before["of"] != now["of"]:
            raise ValueError("--auxiliary-checkpoint is another model than that of the run; pass another --save-dir")
        if before["layer"] != now["layer"]:
            raise ValueError(
                f"--auxiliary-layer is {now['layer']}, and the run began with {before['layer']}; pass that, or "
                "another --save-dir"
            )
        if before["alignment"] != now["alignment"]:
            raise ValueError(
                "the tokenizer of --auxiliary-checkpoint is another one than that of the run; pass another --save-dir"
            )

    @cached_property
    def auxiliary(self) -> AuxiliaryModel:
        """The auxiliary model, made on first use, so that a checkpoint loads without it."""
        if not self.cfg.auxiliary_checkpoint:
            raise ValueError(f"--task {registered_name(self.cfg)} needs --auxiliary-checkpoint")
        return AuxiliaryModel(
            utils.split_paths(self.cfg.data)[0],
            checkpoint=self.cfg.auxiliary_checkpoint,
            layer=getattr(self.cfg, "auxiliary_layer", None),  # a task without this option reads the last
            fp16=self.cfg.auxiliary_fp16 or None,
            tokens_per_sample=self.cfg.tokens_per_sample,
        )
