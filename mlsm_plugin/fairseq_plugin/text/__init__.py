"""Text to fairseq's binarized files, and back."""
