"""Settings of chains that code text, and of imports. Imports nothing slow, since the help of commands needs it."""

from dataclasses import dataclass

from mlsm_plugin.core.files.settings import check, option

STORE = "store"
ONLINE = "online"


@dataclass(frozen=True)
class CoderImport:
    """Facts that are missing in another program's dictionary or SAE. ValueError if a value is out of range."""

    layer: int | None = option(
        None,
        least=0,
        metavar="L",
        help="hidden state that the dictionary is for: 0 is the embeddings, 1 the first layer, ...",
    )
    auxiliary: str | None = option(
        None, metavar="CHECKPOINT", help="model that the dictionary is for: a fairseq checkpoint, or hf:PATH"
    )
    lambda_: float | None = option(None, above=0, help="weight of the L1 penalty (of an .npy file)")
    normalize: bool = option(False, help="scale the rows of an .npy file to unit norm")
    transpose: bool = option(False, help="columns of the .npy file are atoms")

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class StageSettings:
    """The stages of pre-training with the model's own codes, and how the codes are used.

    ValueError if a value is out of range.
    """

    stages: list[int] = option(
        [20], metavar="PERCENT", help="when a stage with new codes begins, in percent of the updates, e.g. 20 60"
    )
    latent_weight: float = option(1.0, above=0, metavar="W", help="weight of the KL from the codes")
    mlm_weight: float = option(1.0, above=0, metavar="W", help="weight of the masked-LM loss")
    latent_source: str = option(
        STORE,
        choices=(STORE, ONLINE),
        help="store: code the dataset at the beginning of a stage; online: code the masked tokens in every update",
    )
    latent_top: int | None = option(None, least=1, help="keep the N strongest atoms of each code")

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class PreprocessSettings:
    """The tokenizer and auxiliary model to use in preprocessing, and how to train a model if none is passed.

    ValueError if a value is out of range.
    """

    tokenizer: str | None = option(None, metavar="DIR", help="use this tokenizer (or hf:PATH) instead of training one")
    auxiliary: str | None = option(
        None,
        metavar="CHECKPOINT",
        help="use this model, with the tokenizer in its folder, instead of training one; hf:PATH is a Hugging Face "
        "folder or hub name",
    )
    auxiliary_arch: str | None = option(
        None,
        metavar="ARCH",
        help="architecture of the auxiliary model (default: mlsm_modern_small, or that of an existing run)",
    )
    auxiliary_updates: int = option(100_000, least=1, help="updates of the auxiliary model")

    def __post_init__(self) -> None:
        check(self)
