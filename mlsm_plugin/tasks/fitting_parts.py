"""Which criterions and models a task trains with: fairseq takes any, also its default criterion, without a word."""

from __future__ import annotations

from typing import Any, ClassVar

from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_REGISTRY, FairseqEncoderDecoderModel, FairseqEncoderModel, FairseqLanguageModel

from mlsm_plugin.fairseq_seams.training_options import registered_name

PACKAGES = (__name__.partition(".")[0], "fairseq")


class FittingParts:
    """A mixin for tasks that refuses criterions and models of other tasks; those of a user's plugin are not known.

    Attributes:
        criterions: names of the criterions of this package and of fairseq that fit.
        encoder_decoder: whether the task trains an encoder-decoder, or else an encoder.
        usual_arch: an architecture that fits, for errors.
    """

    criterions: ClassVar[tuple[str, ...]]
    encoder_decoder: ClassVar[bool] = False
    usual_arch: ClassVar[str] = "mlsm_modern_small"
    cfg: Any

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build the model.

        Raises:
            ValueError: it has another structure than the task needs.
        """
        name = registered_name(cfg)
        structures = {"a decoder": FairseqLanguageModel}
        if self.encoder_decoder:
            structures["an encoder"] = FairseqEncoderModel
        else:
            structures["an encoder-decoder"] = FairseqEncoderDecoderModel
        for structure, kind in structures.items():
            if issubclass(ARCH_MODEL_REGISTRY.get(name, object), kind):
                needed = "an encoder-decoder" if self.encoder_decoder else "an encoder"
                raise ValueError(
                    f"--arch {name} is {structure}, and --task {registered_name(self.cfg)} trains {needed}; pass one, "
                    f"such as --arch {self.usual_arch}"
                )
        return super().build_model(cfg, from_checkpoint)  # type: ignore[misc]

    def build_criterion(self, cfg: Any, *more: Any, **named: Any) -> Any:
        """Build the criterion.

        Raises:
            ValueError: it is that of another task.
        """
        name = registered_name(cfg)
        known = CRITERION_REGISTRY.get(name)
        if known is not None and known.__module__.partition(".")[0] in PACKAGES and name not in self.criterions:
            raise ValueError(
                f"--criterion {name} does not compute the loss of --task {registered_name(self.cfg)}; pass --criterion "
                f"{' or '.join(self.criterions)}"
            )
        return super().build_criterion(cfg, *more, **named)  # type: ignore[misc]
