"""The losses as pure functions of tensors. Nothing in this folder imports fairseq."""
