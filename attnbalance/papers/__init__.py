"""`reproduce`: the figures of three papers, one file per figure."""
