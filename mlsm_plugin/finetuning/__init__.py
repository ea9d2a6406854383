"""Fine-tuning of checkpoints to classify texts, by fairseq's ``sentence_prediction``."""
