"""Dictionaries, sparse codes and the files that hold them; nothing in this folder imports fairseq."""
