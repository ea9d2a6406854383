"""``mlsm adapt``: continue the pre-training of a Hugging Face model on a text; needs no fairseq."""

import argparse
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from mlsm_plugin.cli.actions import add_push_options
from mlsm_plugin.cli.coding_options import OF_LEARNING, output_folder
from mlsm_plugin.cli.evaluate_encoder import add_labelled
from mlsm_plugin.cli.next_commands import filling_command, print_next, similarity_command
from mlsm_plugin.cli.settings_flags import Depends, add_settings, fill_in, refuse_changed, settings_of
from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.files.settings import options_of
from mlsm_plugin.core.hidden_states.settings import ModelRun

EPOCHS = 3.0
OF_CODES = {name: options_of(LearningSettings)[name].default for name in OF_LEARNING if name != "seed"}  # defaults
OF_CODES["coder"] = "topk"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    from mlsm_plugin.evaluation.quality_settings import QualitySettings
    from mlsm_plugin.huggingface.adaptation_settings import Adaptation
    from mlsm_plugin.huggingface.collators import Masking
    from mlsm_plugin.huggingface.training import TrainingSettings

    parser.epilog = (
        "Run the same command again to resume after a stop. Under torchrun, all processes code and train. "
        "docs/huggingface.md shows the same in Python."
    )
    parser.add_argument("model", metavar="MODEL", help="folder or hub name of an encoder with its tokenizer")
    text = "training text, one sentence a line and blank lines between documents; may be .gz, .bz2, .xz"
    parser.add_argument("--text", nargs="+", default=[], metavar="FILE", help=text)
    add_settings(parser, Adaptation, only=("dataset", "split", "column"))
    parser.add_argument("--output", type=output_folder, required=True, metavar="DIR", help="folder for all output")
    objective = {"objective": Depends("mlm; with --student mlsm+mlm")}
    add_settings(parser, Adaptation, only=("objective",), defaults=objective)
    add_settings(parser, Adaptation, only=("student", "vocab_size", "valid_texts"))
    add_settings(parser, Adaptation, only=("max_length", "max_unk_rate", "sentence_transformer"))
    masks = {
        "mask_prob": Depends("0.15; with --student 0.3"),
        "mask_prob_end": Depends("--mask-prob; with --student 0.15"),
    }
    add_settings(parser, Masking, without=("seed",), defaults=masks)
    add_settings(parser, Adaptation, only=("keep_vectors", "teacher", "temperature"))
    codes = parser.add_argument_group("codes, for mlsm and mlsm+mlm (regression+mlm takes --auxiliary and --layer)")
    add_settings(codes, Adaptation, only=("auxiliary", "latent_top", "latent_source"))
    defaults = {**OF_CODES, "layer": Depends("the last")}
    add_settings(codes, LearningSettings, only=tuple(defaults), defaults=defaults)
    training = parser.add_argument_group("training")
    add_settings(training, Adaptation, only=("epochs",))
    recipe = {
        "updates": None,
        "learning_rate": Depends("0.0002; where vectors are kept 0.0005; with --student 0.002"),
        "optimizer": Depends("adamw; with --student muon"),
        "muon_learning_rate": Depends("10 times --learning-rate; with --student 0.01"),
    }
    add_settings(training, TrainingSettings, without=("weight_decay",), defaults=recipe)
    add_settings(training, ModelRun, only=("threads",))
    comparison = parser.add_argument_group("comparison of the models before and after, on held-out text")
    add_labelled(comparison)
    add_settings(comparison, QualitySettings, only=("header",))
    hub = parser.add_argument_group("publishing")
    repository = "push the model to this repository of the Hugging Face hub, which is created if it does not exist"
    hub.add_argument("--push-to-hub", metavar="OWNER/NAME", help=repository)
    add_push_options(hub)


def needs_fairseq(args: argparse.Namespace) -> bool:
    """The command never needs fairseq."""
    return False


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Adapt the model, and print the figures before and after."""
    import torch

    from mlsm_plugin.core.files.process_rank import process_rank
    from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceSource
    from mlsm_plugin.core.sparse_coding.sparse_coder import torch_threads
    from mlsm_plugin.evaluation.held_out_quality import SMALL, HeldOutQuality
    from mlsm_plugin.huggingface.adaptation import adapt
    from mlsm_plugin.huggingface.adaptation_settings import REGRESSION, WITH_CODES, Adaptation
    from mlsm_plugin.huggingface.collators import Masking
    from mlsm_plugin.huggingface.training import TrainingSettings

    if args.epochs is not None and args.updates is not None:
        raise ValueError("pass --epochs or --updates, not both")
    if args.updates is None:
        args.updates = 1
        args.epochs = EPOCHS if args.epochs is None else args.epochs
    _check_push(args)
    _fill_in_recipe(args)
    training = settings_of(TrainingSettings, args)
    learning = None
    if args.objective in WITH_CODES:
        layer = args.layer if hasattr(args, "layer") else HuggingFaceSource.layers_of(args.auxiliary or args.model)
        learning = settings_of(
            LearningSettings,
            args,
            layer=layer,
            fp16=training.in_bf16,
            batch_size=None,  # --batch-size and --learning-rate belong to the Trainer
            learning_rate=None,
        )
    else:
        refuse_changed(args, OF_CODES, "only --objective mlsm and mlsm+mlm take options for making codes")
    regressed_layer = None
    if args.objective == REGRESSION:
        regressed_layer = getattr(args, "layer", None)
    elif learning is None:
        refuse_changed(args, {"layer": None}, f"only --objective mlsm, mlsm+mlm and {REGRESSION} read a layer")
    settings = settings_of(
        Adaptation,
        args,
        model=args.model,
        texts=args.text,
        output=args.output,
        training=training,
        masking=settings_of(Masking, args),
        learning=learning,
        regressed_layer=regressed_layer,
    )
    quality = HeldOutQuality(args.labelled, replace(SMALL, header=args.header))
    with torch_threads(args.threads):
        figures = adapt(settings, quality)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # otherwise, its threads can abort the process at its end
    if process_rank(None, None, os.environ).rank == 0:
        _print_figures(figures, args.output)
        if args.push_to_hub:
            _push(args)
    return 0


def _check_push(args: argparse.Namespace) -> None:
    """Raise ValueError if the finished model could not be pushed."""
    from mlsm_plugin.core.files.hub_repository import check_can_push

    if args.push_to_hub is None and (args.dry_run or args.private):
        raise ValueError("--dry-run and --private need --push-to-hub")
    if args.push_to_hub is not None:
        check_can_push(args.push_to_hub, dry_run=args.dry_run)


def _push(args: argparse.Namespace) -> None:
    from mlsm_plugin.core.files.hub_repository import MAIN, push_branches
    from mlsm_plugin.huggingface.adaptation_folder import MODEL

    folders = {MAIN: Path(args.output, MODEL)}
    print()
    for line in push_branches(folders, args.push_to_hub, private=args.private, dry_run=args.dry_run):
        print(line)


def _fill_in_recipe(args: argparse.Namespace) -> None:
    """Set the options that depend on ``--student``, unless the command line sets them."""
    from mlsm_plugin.huggingface.adaptation_settings import COLLATORS, MASKS_OF_STUDENT, TRAINING_OF_STUDENT
    from mlsm_plugin.huggingface.collators import Masking
    from mlsm_plugin.huggingface.training import TrainingSettings

    training = TrainingSettings()
    masking = Masking()
    if not hasattr(args, "objective"):
        args.objective = "mlm" if args.student is None else "mlsm+mlm"
        _check_begun_with(args.objective, args.output)
    if args.student is not None:
        training = TRAINING_OF_STUDENT
        masking = MASKS_OF_STUDENT if args.objective in COLLATORS and not hasattr(args, "mask_prob") else masking
    rates_are_chosen = hasattr(args, "learning_rate") or hasattr(args, "optimizer")
    muon = None if rates_are_chosen else training.muon_learning_rate
    fill_in(args, {"optimizer": training.optimizer, "learning_rate": training.learning_rate})
    fill_in(args, {"muon_learning_rate": muon})
    fill_in(args, {"mask_prob": masking.mask_prob, "mask_prob_end": masking.mask_prob_end})


def _check_begun_with(objective: str, output: str) -> None:
    """Raise ValueError if a folder was begun with another objective, which was the default or was passed."""
    from mlsm_plugin.huggingface.adaptation_folder import recorded_objective

    recorded = recorded_objective(output)
    if recorded not in (None, objective):
        raise ValueError(
            f"{output} was begun with --objective {recorded}, and the default is {objective}: pass --objective "
            f"{recorded} to continue, or --objective {objective} to train anew"
        )


def _print_quality(quality: JsonObject) -> None:
    """Print the quality of the models before and after."""
    from mlsm_plugin.evaluation.quality_tables import table_of

    if quality["models"]:
        print(f"\n{_heading(quality)}")
        print("\n".join(table_of(quality["models"])))
    for note in quality["notes"]:
        print(note)


def _heading(quality: JsonObject) -> str:
    """What the models were measured on."""
    if quality["sentences"]:
        return f"held-out text: {quality['sentences']} sentences, {quality['passages']} passages"
    if quality.get("lines"):  # records of earlier versions lack it
        return f"held-out text: {quality['lines']} lines"
    return "labelled files:"


def _print_figures(figures: dict[str, JsonObject], output: str) -> None:
    for name, value in figures["after"].items():
        before = figures["before"].get(name)
        print(f"held-out {name}: {'' if before is None else f'{before:.4f} before, '}{value:.4f} after")
    if "quality" in figures:
        _print_quality(figures["quality"])
    print(f"model: {output}/model")
    print_next("Use it with", _usage(Path(output), fills_masks="mlm_loss" in figures["after"]))


def _usage(output: Path, *, fills_masks: bool) -> str:
    """A command that tries the model on sentences of the held-out text."""
    from mlsm_plugin.core.files.sentence_modules import MODULES_FILE
    from mlsm_plugin.huggingface.adaptation_folder import HELD_OUT_TEXT, MODEL

    model = output / MODEL
    text = output / HELD_OUT_TEXT
    is_sentence_transformer = (model / MODULES_FILE).exists() and find_spec("sentence_transformers") is not None
    if fills_masks and not is_sentence_transformer:
        return filling_command(model, text)
    return similarity_command(model, text, is_sentence_transformer=is_sentence_transformer)
