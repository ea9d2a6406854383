"""How text is coded in chains, and what other programs do not say; imports nothing slow, for the help of commands."""

from dataclasses import dataclass

from mlsm_plugin.core.files.settings import check, option

STORE = "store"
ONLINE = "online"


@dataclass(frozen=True)
class CoderImport:
    """What the files of another program do not say of a dictionary or SAE. ValueError if a value is out of range."""

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
    """The stages of a pre-training with the model's own codes, and how these are learned.

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
    """What of a preprocessing is given, and the auxiliary model that is trained if none is.

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
