"""Sparse autoencoders and dictionaries in other programs' files; one module for each format."""
