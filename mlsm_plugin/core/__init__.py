"""What both doors share. Nothing here knows fairseq."""
