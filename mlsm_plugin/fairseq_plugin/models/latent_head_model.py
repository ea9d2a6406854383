"""The common part of this package's RoBERTa-like models: an LM head that also predicts latent properties."""

import argparse
import functools
import logging
from collections.abc import Callable

from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model_architecture
from fairseq.models.roberta.model import RobertaEncoder, RobertaModel, base_architecture
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from fairseq.tasks import FairseqTask
from fairseq.utils import safe_getattr
from torch import Tensor, nn

from mlsm_plugin.core.losses.zero_gradients import zero_with_gradient
from mlsm_plugin.core.masking.chosen_tokens import ChosenTokens
from mlsm_plugin.core.masking.word_boundaries import SPAN_MASKS
from mlsm_plugin.fairseq_plugin.compat import version_shims
from mlsm_plugin.fairseq_plugin.compat.model_parts import (
    ATOM_PROJECTION,
    VOCABULARY_WEIGHTS,
    DividedLMHead,
    Extra,
    RobertaHub,
    lm_head,
    sentence_encoder,
    token_embeddings,
)

logger = logging.getLogger(__name__)

# layers and width of the named architectures (Turc et al., 2019)
ARCHITECTURE_SIZES = {"tiny": (2, 128), "small": (4, 512), "medium": (8, 512), "base": (12, 768)}


class LatentHead(DividedLMHead):
    """RoBERTa's LM head with an optional second projection, to atom logits."""

    def __init__(self, embed_dim: int, output_dim: int, activation_fn: str, weight: nn.Parameter | None = None) -> None:
        super().__init__(embed_dim, output_dim, activation_fn, weight)
        self.atom_projection: nn.Linear | None = None

    def add_atom_projection(self, num_atoms: int) -> None:
        """Add the projection to ``num_atoms`` atom logits, initialized like BERT's linear layers."""
        self.atom_projection = nn.Linear(self.width, num_atoms)
        init_bert_params(self.atom_projection)

    def atom_logits(self, transformed: Tensor) -> Tensor:
        """The logits of the dictionary's atoms, ``(..., num_atoms)``; ValueError if the head has no such projection."""
        if self.atom_projection is None:
            raise ValueError("this model has no atom logits; train it with --task masked_latent_semantic")
        return self.atom_projection(transformed)

    def idle_parameters(self, *, project_tokens: bool, project_atoms: bool) -> list[nn.Parameter]:
        """The parameters that only belong to projections that are not computed."""
        idle = [] if project_tokens else self.own_token_parameters()
        if self.atom_projection is not None and not project_atoms:
            idle.extend(self.atom_projection.parameters())
        return idle


class LatentHeadEncoder(RobertaEncoder):
    """:class:`RobertaEncoder` with a :class:`LatentHead`."""

    can_choose_tokens = True  # forward has the argument ``only``

    def build_lm_head(
        self, embed_dim: int, output_dim: int, activation_fn: str, weight: nn.Parameter | None
    ) -> LatentHead:
        """The head; ``weight`` is the weight of the token embeddings. fairseq calls this."""
        return LatentHead(embed_dim, output_dim, activation_fn, weight)

    def forward(
        self,
        src_tokens: Tensor,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        masked_tokens: Tensor | None = None,
        project_tokens: bool = True,
        project_atoms: bool = False,
        has_padding: bool | None = None,
        only: ChosenTokens | None = None,
        **unused: object,
    ) -> tuple[Tensor | None, Extra]:
        """As :meth:`RobertaEncoder.forward`, with a choice of outputs.

        Args:
            src_tokens: ``(B, T)`` ids.
            masked_tokens: ``(B, T)`` bool, the tokens to project; None: all tokens.
            project_tokens: compute the vocabulary logits, which are the first result (otherwise None).
            project_atoms: compute the atom logits, as ``extra["atom_logits"]``.
            has_padding: whether ``src_tokens`` has padding, if known; not every encoder uses it.
            only: the tokens to project; replaces ``masked_tokens``, without waiting for a GPU.

        With logits, ``extra["features"]`` are the final hidden states of all tokens, if they were computed,
        ``extra["transformed"]`` is the input of the projections, and ``extra["zero_with_gradient"]`` is the zero to add
        to a loss (``losses.zero_gradients``).
        """
        if features_only:
            return self.extract_features(src_tokens, return_all_hiddens=return_all_hiddens, has_padding=has_padding)
        if only is None and masked_tokens is not None:
            only = ChosenTokens.of(masked_tokens)
        x, extra = self.features_to_project(src_tokens, only, return_all_hiddens, has_padding)
        transformed = self.lm_head.transform(x)
        extra["transformed"] = transformed
        if project_atoms:
            extra["atom_logits"] = self.lm_head.atom_logits(transformed)
        idle = self.lm_head.idle_parameters(project_tokens=project_tokens, project_atoms=project_atoms)
        extra["zero_with_gradient"] = zero_with_gradient(idle, x.device)
        return self.lm_head.token_logits(transformed) if project_tokens else None, extra

    def features_to_project(
        self, src_tokens: Tensor, only: ChosenTokens | None, return_all_hiddens: bool, has_padding: bool | None
    ) -> tuple[Tensor, Extra]:
        """The final hidden states of the tokens ``only``, ``(N, dim)``, and the other output of ``extract_features``.

        Without ``only``, the final hidden states of all tokens, ``(B, T, dim)``.
        """
        x, extra = self.extract_features(src_tokens, return_all_hiddens=return_all_hiddens, has_padding=has_padding)
        return x if only is None else x.flatten(0, 1)[only.flat], {**extra, "features": x}


class LatentHeadModel(RobertaModel):
    """A RoBERTa-like model for masked latent semantic modeling (Berend, ACL Findings 2023).

    The atom projection is made last, so that with the same seed all other parameters start as they do without it.
    """

    encoder_class = LatentHeadEncoder

    def __init__(self, args: FairseqDataclass, encoder: LatentHeadEncoder) -> None:
        super().__init__(args, encoder)
        self.finish_parameters()
        if safe_getattr(args, "num_atoms", None):
            lm_head(self).add_atom_projection(args.num_atoms)

    def finish_parameters(self) -> None:
        """Change the weights after fairseq's initialization; called before the atom projection is made."""

    @staticmethod
    def add_atoms_option(parser: argparse.ArgumentParser) -> None:
        """Add ``--num-atoms``."""
        text = "number of atom logits of the latent head (default: number of atoms in the codes of the data)"
        parser.add_argument("--num-atoms", type=int, metavar="N", help=text)

    @classmethod
    def build_model(cls, args: FairseqDataclass, task: FairseqTask) -> "LatentHeadModel":
        """Build the model for ``task``, without a latent head if ``num_atoms`` is not set."""
        with version_shims.open_config(args):
            base_architecture(args)
            if not safe_getattr(args, "max_positions", None):
                args.max_positions = safe_getattr(args, "tokens_per_sample", None) or task.max_positions()
            return cls(args, cls.encoder_class(args, task.source_dictionary))

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Adapt the latent head of a checkpoint to this model: drop it, keep it, or replace it by a new head.

        The symbols that NPM adds for masked spans are dropped if the task does not have them.
        """
        super().upgrade_state_dict_named(state_dict, name)
        prefix = f"{name}." if name else ""
        self._drop_span_masks(state_dict, prefix)
        self._fit_latent_head(state_dict, prefix + ATOM_PROJECTION)

    def _drop_span_masks(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        num_symbols = len(token_embeddings(sentence_encoder(self)).weight)
        longer = num_symbols + len(SPAN_MASKS)
        dropped = [key for key in VOCABULARY_WEIGHTS if len(state_dict.get(prefix + key, ())) == longer]
        for key in dropped:
            state_dict[prefix + key] = state_dict[prefix + key][:num_symbols]
        if dropped:
            logger.info("the checkpoint's %s are not used by this task and are left out", " and ".join(SPAN_MASKS))

    def _fit_latent_head(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        saved = {key: state_dict[key] for key in state_dict if key.startswith(prefix)}
        projection = lm_head(self).atom_projection
        new = {} if projection is None else {prefix + key: value for key, value in projection.state_dict().items()}
        if {key: value.shape for key, value in saved.items()} == {key: value.shape for key, value in new.items()}:
            return
        for key in saved:
            del state_dict[key]
        state_dict.update(new)
        if not new:
            logger.info("the checkpoint's latent head is not used by this task and is left out")
        elif not saved:
            logger.info("the checkpoint has no latent head: a new one is initialized at random")
        else:
            logger.warning(
                "the checkpoint's latent head has %d atoms, the codes have %d: a new head is initialized at random",
                len(saved[prefix + "bias"]),
                len(new[prefix + "bias"]),
            )

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str,
        checkpoint_file: str | None = None,
        data_name_or_path: str = ".",
        bpe: str = "sentencepiece",
        **kwargs: str,
    ) -> RobertaHub:
        """Load a trained model from a folder; see :func:`mlsm_plugin.hub.from_pretrained`."""
        from mlsm_plugin import hub

        return hub.from_pretrained(model_name_or_path, checkpoint_file, data_name_or_path, bpe=bpe, **kwargs)


def set_missing(args: FairseqDataclass, **defaults: object) -> None:
    """Set options that have no value yet."""
    for name, value in defaults.items():
        setattr(args, name, safe_getattr(args, name, value))


def register_sizes(model: str, architecture: Callable[..., None], sizes: dict[str, tuple[int, int]]) -> None:
    """Register the architecture ``model`` with the size ``base``, and one for each size, such as ``model_tiny``.

    ``architecture`` sets options in ``args`` that have no value yet, from ``layers`` and ``dim``.
    """
    architectures = {model: sizes["base"]} | {f"{model}_{name}": size for name, size in sizes.items()}
    for name, (layers, dim) in architectures.items():
        register_model_architecture(model, name)(functools.partial(architecture, layers=layers, dim=dim))
