"""A local web page that shows what a model and its latent properties make of a sentence."""
