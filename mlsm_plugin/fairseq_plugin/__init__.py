"""All code that registers with fairseq or reads its files."""
