"""Masking of spans, words and shares of a text, on tensors and arrays."""
