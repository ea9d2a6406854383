"""Hidden states of one layer of a model, for any binarized text: encoders, their registry, and reading of blocks."""
