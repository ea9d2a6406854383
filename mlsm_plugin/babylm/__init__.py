"""The BabyLM challenge: from a folder of text to the branches of a submission, with a ledger of all words."""
