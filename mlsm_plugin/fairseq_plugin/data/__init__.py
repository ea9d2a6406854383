"""fairseq datasets of ids and codes."""
