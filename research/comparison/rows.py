"""The objectives and controls of the comparison: the rows of its tables."""

from __future__ import annotations

from dataclasses import dataclass

MLSM = ("--task", "masked_latent_semantic", "--criterion", "latent_semantic_kl")
BOTH = (*MLSM, "--mlm-weight", "1")
CODERS = ("topk", "lasso")
AUXILIARY = "auxiliary"  # codes of a separate auxiliary model
SELF = "self"  # codes of the model itself
RANDOM = "random-dictionary"


@dataclass(frozen=True)
class Row:
    """An objective, or a control.

    Attributes:
        flags: of ``fairseq-train``: task and criterion.
        codes: None, ``auxiliary``, ``self``, the name of the other coder, or the kind of a control.
        rate_of: the row with the learning rate to use; None: a rate is searched for this row.
        all_seeds: run with every seed, not only with the first one.
        metric: the metric of the validation log that decides the learning rate.
        begins_from: the row with the checkpoint to start from.
        control_of: for a control, its row, which also determines its cost. A control of ``self`` continues the first
            stage of ``self`` with the same seed.
    """

    flags: tuple[str, ...]
    codes: str | None = None
    rate_of: str | None = None
    all_seeds: bool = False
    metric: str = "mlm_loss"
    begins_from: str | None = None
    control_of: str | None = None

    @property
    def with_mlm(self) -> bool:
        """Whether a masked-LM loss is added to the loss of the codes."""
        return self.flags[: len(BOTH)] == BOTH

    @property
    def has_mlm_head(self) -> bool:
        """Whether a masked-LM loss trains the output layer."""
        return self.metric in ("mlm_loss", "loss") and self.begins_from is None


CONTROLS = ("exchanged", "exchanged-within-types", "type-mean", RANDOM)
CONTROLS_OF_SELF = {f"{SELF}-{kind}": kind for kind in ("exchanged-within-types", RANDOM)}
ROWS: dict[str, Row] = {
    "mlm": Row(("--task", "plain_masked_lm", "--criterion", "masked_lm"), all_seeds=True, metric="loss"),
    "mlsm+mlm": Row(BOTH, codes=AUXILIARY, all_seeds=True),
    "self": Row(BOTH, codes=SELF, rate_of="mlsm+mlm", all_seeds=True),
    "taco": Row(("--task", "taco", "--criterion", "token_contrastive"), all_seeds=True),
    "mlsm": Row((*MLSM, "--mlm-weight", "0"), codes=AUXILIARY, metric="kl"),
    "lasso": Row(BOTH, codes="lasso", rate_of="mlsm+mlm"),
    "npm": Row(
        ("--task", "nonparametric_masked_lm", "--criterion", "span_contrastive"), metric="loss", begins_from="mlm"
    ),
    **{name: Row(BOTH, codes=name, rate_of="mlsm+mlm", control_of="mlsm+mlm") for name in CONTROLS},
    **{name: Row(BOTH, codes=SELF, rate_of="mlsm+mlm", control_of=SELF) for name in CONTROLS_OF_SELF},
}


def ordered(names: list[str]) -> list[str]:
    """The names of rows in the order in which they run, including the rows that they begin from."""
    needed = {*names, *(ROWS[name].begins_from for name in names)}
    if any(ROWS[name].control_of == SELF for name in names):
        needed.add(SELF)
    return [name for name in ROWS if name in needed]
