"""What training with fairseq and with Hugging Face share. Nothing here imports fairseq."""
