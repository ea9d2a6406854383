"""torch optimizers for training with fairseq and with Hugging Face."""
