"""Low-rank updates of a model's layers (LoRA, Hu et al., 2022) with ``peft``, merged into its weights at the end."""

from torch import nn

from mlsm_plugin.core.optimizers.muon import matrices_of_layers
from mlsm_plugin.huggingface.pretraining_model import PretrainingModel


def add_low_rank(model: PretrainingModel, rank: int) -> None:
    """Freeze the encoder, and add an update of this rank to each matrix of its layers; heads are still trained.

    ValueError if ``peft`` is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ValueError("--lora needs the package peft: pip install peft") from None
    heads = [parameter for parameter in model.head_parameters() if parameter.requires_grad]
    matrices = {id(weight) for weight in matrices_of_layers(model)}
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) in matrices
    ]
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=layers), model)
    for parameter in heads:
        parameter.requires_grad_(True)


def merge_low_rank(model: nn.Module) -> None:
    """Add the updates to the matrices, which gives a stock model again; ValueError if they are not finite."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge(safe_merge=True)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
