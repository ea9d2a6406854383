"""Search by codes: BM25 over the properties of tokens, over words, or both, with reasons for each result."""
