"""The one-layer models of three papers with closed-form gradients, and the papers' theorems as functions."""
