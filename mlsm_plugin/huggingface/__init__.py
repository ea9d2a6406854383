"""The objectives for models of Hugging Face, without fairseq: coding, collators, models for the library's Trainer."""
