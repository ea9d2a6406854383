"""What is masked: spans, words, shares; tensors and arrays in, out."""
