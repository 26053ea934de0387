"""`explain`: why facts were lost between two checkpoints."""
