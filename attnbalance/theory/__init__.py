"""The theory lab: the one-layer models of three papers, their theorems as functions, and what training does to them."""
