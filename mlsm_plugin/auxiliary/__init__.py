"""The auxiliary model: a checkpoint to the hidden states of one of its layers."""
