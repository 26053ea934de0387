"""`trajectory`: the checkpoints of one training run measured on the same prompts, step by step."""
