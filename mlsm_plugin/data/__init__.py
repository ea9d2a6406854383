"""Datasets: ids (and codes) to batches, one small dataset a file."""
