"""Atomic files, sharded stores, the record of finished steps, and the locations of models and tokenizers."""
