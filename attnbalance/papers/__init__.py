"""`reproduce`: the figures of three papers, one file for each."""
