"""Text to ids: SentencePiece training, fairseq's ``dict.txt``, and the binarized dataset."""
