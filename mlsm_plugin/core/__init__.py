"""Code shared by training with fairseq and with Hugging Face. Nothing here imports fairseq."""
