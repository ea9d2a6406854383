"""Codes of binarized text, stored or computed during training."""
