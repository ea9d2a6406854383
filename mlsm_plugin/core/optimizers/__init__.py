"""Optimizers of torch that both doors use."""
