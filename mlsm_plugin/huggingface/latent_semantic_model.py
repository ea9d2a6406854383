"""MLSM for Hugging Face masked LMs (Berend, ACL Findings 2023)."""

import logging
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from mlsm_plugin.core.coding.coder_fit import check_width
from mlsm_plugin.core.coding.state_codes import StateCodes
from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.finite_weights import check_finite_weights
from mlsm_plugin.core.files.hf_files import LATENT_HEAD, hf_folder
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceEncoder
from mlsm_plugin.core.losses.latent_semantic import LATENT_LOSSES, check_weights, latent_semantic_terms
from mlsm_plugin.core.losses.zero_gradients import zero_with_gradient
from mlsm_plugin.core.sparse_coding.formats.foreign_files import read_safetensors
from mlsm_plugin.core.sparse_coding.sparse_coder import SparseCoder
from mlsm_plugin.core.sparse_coding.stored_codes import check_top
from mlsm_plugin.huggingface.auxiliary_states import AuxiliaryStates
from mlsm_plugin.huggingface.collators import IGNORED
from mlsm_plugin.huggingface.pretraining_model import (
    TRAINER_CHECKPOINT,
    Objective,
    PretrainingModel,
    head_of,
    head_transform,
    sums_of_rows,
)

logger = logging.getLogger(__name__)

OF_LATENT_HEAD = ("weight", "bias")


class LatentSemanticModel(PretrainingModel):
    """A masked LM with a latent head: MLSM (Berend, ACL Findings 2023), with or without MLM.

    Args (of :meth:`of` and :meth:`from_pretrained`):
        num_atoms: number of atoms of the codes; None: as in the latent head in the folder.
        latent_weight, mlm_weight: weights of the two losses, not negative, not both 0.
        latent_target: ``distribution``: KL divergence from the code; ``argmax``: cross entropy with its strongest atom.
    """

    figures: ClassVar[tuple[str, ...]] = ("kl", "mlm_loss", "masked_share")
    added_parts: ClassVar[tuple[str, ...]] = ("latent_head", "auxiliary_states", "_state_codes")
    latent_head: nn.Linear
    _state_codes: StateCodes | None = None  # of the hidden states of the auxiliary model

    def compute_codes(self, encoder: HuggingFaceEncoder, coder: SparseCoder, *, latent_top: int | None = None) -> None:
        """Compute the codes of each batch from the hidden states of an auxiliary model, in the place of stored codes.

        The batches must come from ``AuxiliaryTextCollator``. ``latent_top`` is the number of strongest atoms to keep
        of each code; None: all. ValueError if the coder does not fit the encoder or the latent head.
        """
        check_width(encoder, coder)
        if coder.num_atoms != self.latent_head.out_features:
            raise ValueError(f"the latent head has {self.latent_head.out_features} atoms, the coder {coder.num_atoms}")
        check_top(latent_top)
        self.auxiliary_states = AuxiliaryStates(encoder)
        self._state_codes = StateCodes(coder, latent_top)

    def targets_record(self) -> dict[str, object]:
        """See the base class; with :meth:`compute_codes`, also what decides the codes."""
        record = super().targets_record()
        return record if self._state_codes is None else record | self._state_codes.record()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, path: PathLike, *, num_atoms: int | None = None, **options: Any
    ) -> Self:
        """Open a stock folder or hub name, and the latent head in it if that has ``num_atoms`` atoms.

        A missing masked-LM head is initialized at random. ValueError if the model does not exist, the latent head is
        damaged, or it is missing and ``num_atoms`` is None.
        """
        saved = read_latent_head(hf_folder(path, weights=True) / LATENT_HEAD)
        if num_atoms is None:
            if saved is None:
                raise ValueError(f"{path} has no latent head; pass num_atoms, the number of atoms of the codes")
            num_atoms = len(saved["bias"])
        model = cls.of(cls.opened(path, **options), num_atoms=num_atoms, **options)
        if saved is not None and saved["weight"].shape == model.latent_head.weight.shape:
            model.latent_head.load_state_dict({name: saved.pop(name) for name in OF_LATENT_HEAD})
            shapes = {name: values.shape for name, values in model.state_dict().items()}
            head_weights = {name: values for name, values in saved.items() if shapes.get(name) == values.shape}
            model.load_state_dict(head_weights, strict=False)
        elif saved is not None:
            logger.warning(
                f"the latent head of {path} has {len(saved['bias'])} atoms, but {num_atoms} are needed; a new one is "
                "initialized at random"
            )
        return model

    @classmethod
    def keeps_head(cls, *, mlm_weight: float = 1.0, **options: Any) -> bool:
        """Whether the masked-LM loss is trained."""
        return mlm_weight > 0

    @property
    def has_trained_head(self) -> bool:
        """Whether the masked-LM loss is trained."""
        return self.mlm_weight > 0

    def set_objective(
        self,
        *,
        num_atoms: int | None = None,
        latent_weight: float = 1.0,
        mlm_weight: float = 1.0,
        latent_target: str = "distribution",
    ) -> None:
        """Set the options of the class, and add a new latent head; ValueError if an option is out of range."""
        check_weights(latent_weight, mlm_weight)
        if latent_target not in LATENT_LOSSES:
            raise ValueError(f"latent_target must be one of {', '.join(LATENT_LOSSES)}, got {latent_target}")
        if num_atoms is None or num_atoms < 1:
            raise ValueError(f"num_atoms must be at least 1, got {num_atoms}")
        self.latent_weight = latent_weight
        self.mlm_weight = mlm_weight
        self.latent_target = latent_target
        head = head_of(self)
        weight = self.get_input_embeddings().weight
        self.latent_head = nn.Linear(head.width, num_atoms, device=weight.device, dtype=weight.dtype)
        # initialized as transformers initializes the linear layers of the model
        nn.init.normal_(self.latent_head.weight, std=getattr(self.config, "initializer_range", 0.02))
        nn.init.zeros_(self.latent_head.bias)

    def _objective(
        self,
        labels: Tensor,
        *,
        codes: dict[str, Tensor] | None = None,
        auxiliary: dict[str, Tensor] | None = None,
        **inputs: Tensor,
    ) -> Objective:
        if self.auxiliary_states is not None and self._state_codes is not None and auxiliary is not None:
            codes = self._state_codes.of_states(self.auxiliary_states.of_places(**auxiliary))
        if self.latent_weight > 0 and codes is None:
            maker = "LatentSemanticCollator" if self._state_codes is None else "AuxiliaryTextCollator"
            raise ValueError(f"the batch has no codes; make it with {maker}")
        head = head_of(self)
        masked = labels != IGNORED
        transformed = head.transform(self._encoded(**inputs)[0][masked])
        unused_weights = [] if self.mlm_weight > 0 or head.bias is None else [head.bias]
        unused_weights += [] if self.latent_weight > 0 else [*self.latent_head.parameters()]
        terms = latent_semantic_terms(
            targets=labels[masked],
            token_logits=head.project(transformed) if self.mlm_weight > 0 else None,
            atom_logits=self.latent_head(transformed) if self.latent_weight > 0 else None,
            codes=codes,
            latent_weight=self.latent_weight,
            mlm_weight=self.mlm_weight,
            latent_target=self.latent_target,
            zero=zero_with_gradient(unused_weights).to(labels.device),
        )
        masked_of_rows = masked.sum(dim=1)
        kl = mlm = [labels.new_zeros(len(labels))] * 2
        if terms.latent is not None and terms.nonzeros is not None:
            kl = [sums_of_rows(terms.latent, masked), sums_of_rows(terms.nonzeros > 0, masked)]
        if terms.mlm is not None:
            mlm = [sums_of_rows(terms.mlm, masked), masked_of_rows]
        # the Trainer counts all masked tokens, the sample size only those with a code
        number = masked_of_rows.sum()
        sample_size = torch.as_tensor(terms.sample_size).clamp(min=1)
        return terms.loss * (number / sample_size), number, [*kl, *mlm, masked_of_rows]

    def latent_logits(self, input_ids: Tensor, attention_mask: Tensor, chosen: Tensor) -> Tensor:
        """Atom logits ``(n_chosen, num_atoms)`` for the ``chosen`` tokens (bool); all inputs are ``(B, T)``."""
        hidden = self._encoded(input_ids=input_ids, attention_mask=attention_mask)[0][chosen]
        logits: Tensor = self.latent_head(head_of(self).transform(hidden))
        return logits

    def save_pretrained(
        self, save_directory: PathLike, *args: object, state_dict: dict[str, Tensor] | None = None, **options: object
    ) -> None:
        """Write a stock model folder like :meth:`PretrainingModel.save_pretrained`, and a file with the latent head.

        Without a trained masked-LM head, the first half of that head is saved in the file of the latent head. In a
        Trainer's ``checkpoint-N``, the file of the model also has the latent head: the Trainer restores only that file.
        """
        from safetensors.torch import save_file

        state = self.state_dict() if state_dict is None else state_dict
        prefix = "latent_head."
        latent = {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}
        stock = {name: values for name, values in state.items() if not name.startswith(prefix)}
        resumable = bool(TRAINER_CHECKPOINT.fullmatch(Path(save_directory).name))
        super().save_pretrained(save_directory, *args, state_dict=state if resumable else stock, **options)
        if options.get("is_main_process", True):
            if not self.has_trained_head:
                latent |= head_transform(self, stock)
            contents = {name: value.detach().float().cpu().contiguous() for name, value in latent.items()}
            save_file(contents, Path(save_directory) / LATENT_HEAD)


def read_latent_head(path: Path) -> dict[str, Tensor] | None:
    """The weights in the file of a latent head, including ``weight`` ``(n_atoms, width)``; None if there is no file.

    ValueError if the file is damaged.
    """
    if not path.is_file():
        return None
    file = read_safetensors(path)
    weights = {"weight": file.take("weight", 2), "bias": file.take("bias"), **file.rest()}
    if weights["bias"].shape != weights["weight"].shape[:1]:
        raise ValueError(f"{path} does not hold a latent head (weight and bias); delete it for a new one")
    check_finite_weights(weights.items(), path)
    return weights
