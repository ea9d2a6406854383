"""Convert text to fairseq's binarized files, and back."""
