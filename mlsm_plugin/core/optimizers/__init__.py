"""Optimizers of torch for training with fairseq and with Hugging Face."""
