"""Sparse autoencoders and dictionaries in the files of other programs: one module for each format."""
