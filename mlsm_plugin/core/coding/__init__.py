"""Hidden states of a text to sparse codes; learning what codes them."""
