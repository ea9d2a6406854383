"""Learn sparse coders, and turn the hidden states of a text into sparse codes."""
