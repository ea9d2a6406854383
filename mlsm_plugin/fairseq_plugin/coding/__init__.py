"""Codes of binarized text, stored or made while training."""
