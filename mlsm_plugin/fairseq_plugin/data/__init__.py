"""Ids and codes to fairseq's datasets."""
