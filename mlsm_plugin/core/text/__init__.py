"""Tokenizers and text files, and checks of text before it becomes ids."""
