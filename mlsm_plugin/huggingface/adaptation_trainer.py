"""The Trainer of an adaptation, and what it is made of: model, tokenizer, collator and datasets."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from mlsm_plugin.core.coding.settings import ONLINE, STORE
from mlsm_plugin.core.files.npy_files import read_npy
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceEncoder, load_masked_lm, positions_of
from mlsm_plugin.core.masking.span_groups import SpanRules
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.core.text.hf_tokenizer import load_fast_tokenizer
from mlsm_plugin.huggingface.adaptation_folder import CHECKPOINTS, DICTIONARY, DIRECTIONS, LOGS, TEXT_PARTS
from mlsm_plugin.huggingface.adaptation_settings import COLLATORS, MODELS, REGRESSION, VECTORS
from mlsm_plugin.huggingface.adaptation_setup import AdaptationSetup
from mlsm_plugin.huggingface.adaptation_text import AdaptationText
from mlsm_plugin.huggingface.collators import AuxiliaryTextCollator, MaskedLmCollator, SpanGroupsCollator
from mlsm_plugin.huggingface.epoch_order import samples_of_update
from mlsm_plugin.huggingface.kept_states_model import KeptStatesModel
from mlsm_plugin.huggingface.latent_semantic_model import LatentSemanticModel
from mlsm_plugin.huggingface.low_rank import add_low_rank
from mlsm_plugin.huggingface.pretraining_model import PretrainingModel
from mlsm_plugin.huggingface.pretraining_sequences import PretrainingSequences, SpanGroups
from mlsm_plugin.huggingface.sentence_vectors import SentenceCollator, SentenceVectors
from mlsm_plugin.huggingface.student_model import new_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer


class TrainerParts:
    """The Trainer of an adaptation and its parts, each opened once, on first use."""

    def __init__(self, setup: AdaptationSetup, text: AdaptationText) -> None:
        self.setup = setup
        self.settings = setup.settings
        self.text = text

    @cached_property
    def fast_tokenizer(self) -> "PreTrainedTokenizerFast":
        """The tokenizer in the form that the collators take and that is saved."""
        tokenizer: PreTrainedTokenizerFast = load_fast_tokenizer(self.text.tokenizer_folder)
        return tokenizer

    @cached_property
    def encoder(self) -> HuggingFaceEncoder:
        """The auxiliary model, up to its layer."""
        setup = self.setup
        half = setup.training.in_bf16 if setup.learning is None else setup.learning.fp16
        return HuggingFaceEncoder(self.settings.auxiliary_model, layer=setup.layer, device=setup.device, fp16=half)

    @cached_property
    def model(self) -> PretrainingModel:
        """The model with its objective; new weights depend only on the seed."""
        training = self.setup.training
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(training.seed)
            model = self._with_objective()
            if training.lora is not None:
                add_low_rank(model, training.lora)
            return model

    def _with_objective(self) -> PretrainingModel:
        settings = self.settings
        kind = MODELS[settings.objective]
        if self.setup.learning is not None:
            mlm_weight = float(settings.objective == "mlsm+mlm")
            stock = self._stock(mlm_weight=mlm_weight)
            return kind.of(stock, num_atoms=self.setup.learning.atoms, mlm_weight=mlm_weight)
        stock = self._stock()
        if settings.objective == REGRESSION:
            return kind.of(stock, auxiliary=self.encoder)
        if settings.objective == VECTORS:
            return kind.of(stock, width=self.setup.config.hidden_size, pooling=self.setup.pooling)
        if settings.objective == "distill":
            teacher = load_masked_lm(str(settings.teacher_model))
            return kind.of(stock, teacher=teacher, temperature=settings.temperature)
        if self.setup.keep_weight:
            return KeptStatesModel.of(stock, keep_weight=self.setup.keep_weight)
        return kind.of(stock)

    def _stock(self, **options: float) -> "PreTrainedModel":
        """The model before it gets its objective."""
        stock: PreTrainedModel
        dropout = self.setup.training.attention_dropout
        if self.settings.student is None:
            kind = MODELS[self.settings.objective]
            stock = kind.opened(self.settings.model, attention_dropout=dropout, **options)
        else:
            stock = new_model(self.setup.config, self.fast_tokenizer, attention_dropout=dropout)
        return stock

    @cached_property
    def trainer(self) -> "Trainer":
        """The Trainer; ValueError if model, text and batches do not fit together."""
        from transformers import PrinterCallback, Trainer
        from transformers.integrations import TensorBoardCallback

        from mlsm_plugin.huggingface.trainer_callback import ProgressBars, TensorBoardLog, prepare

        setup = self.setup
        train_dataset, eval_dataset = self._datasets()
        if isinstance(self.model, LatentSemanticModel) and self.settings.latent_source == ONLINE:
            coder = load_coder(setup.output / DICTIONARY)
            self.model.compute_codes(self.encoder, coder, latent_top=self.settings.latent_top)
        training = replace(setup.training, updates=setup.updates(len(train_dataset)))
        trainer = prepare(
            Trainer(
                self.model,
                training.arguments(setup.output / CHECKPOINTS),
                data_collator=self._collator(),
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                optimizers=(training.optimizer_of(self.model), None),
            )
        )
        trainer.remove_callback(PrinterCallback)  # it prints each log if the Trainer's own bar is off
        tokens_of_sample = self.text.sequences[0].num_tokens / len(train_dataset)
        trainer.add_callback(ProgressBars(samples_of_update(trainer.args) * tokens_of_sample))
        if trainer.pop_callback(TensorBoardCallback) is not None:
            board = TensorBoardLog()
            # otherwise, figures from before the training would be logged to the current folder
            board.logging_dir = str(setup.output / LOGS / "training")
            trainer.add_callback(board)
        return trainer

    def _collator(self) -> MaskedLmCollator | SpanGroupsCollator | SentenceCollator:
        """The collator, which makes the batches."""
        masking = self.settings.masking
        if self.settings.objective == "npm":
            rules = SpanRules(mask_prob=masking.mask_prob)
            length = positions_of(self.setup.config)
            return SpanGroupsCollator(self.fast_tokenizer, max_length=length, rules=rules, seed=masking.seed)
        if self.settings.objective == VECTORS:
            return SentenceCollator(self.fast_tokenizer)
        if self.settings.latent_source == ONLINE:
            return AuxiliaryTextCollator(self.fast_tokenizer, masking=masking)
        return COLLATORS[self.settings.objective](self.fast_tokenizer, masking=masking)

    def _datasets(self) -> Sequence[PretrainingSequences | SpanGroups | SentenceVectors]:
        """The datasets to train and to evaluate on."""
        text = self.text
        if self.setup.learning is not None and self.settings.latent_source == STORE:
            stores = [self.setup.output / f"{name}.codes" for name in TEXT_PARTS]
            return [
                PretrainingSequences(sequences, store, aligned=aligned)
                for sequences, store, aligned in zip(text.sequences, stores, text.aligned, strict=True)
            ]
        if self.settings.objective == VECTORS:
            return self._with_vectors()
        if self.settings.objective == "npm":
            return [SpanGroups(sequences) for sequences in text.sequences]
        pairs = zip(text.sequences, text.aligned, strict=True)
        return [PretrainingSequences(sequences, aligned=aligned) for sequences, aligned in pairs]

    def _with_vectors(self) -> list[SentenceVectors]:
        """Both parts of the text with the teacher's vectors."""
        directions = read_npy(self.setup.output / DIRECTIONS) if self.setup.narrows_vectors else None
        pairs = zip(self.text.sequences, self.text.vectors, strict=True)
        return [SentenceVectors(sequences, vectors, directions=directions) for sequences, vectors in pairs]
