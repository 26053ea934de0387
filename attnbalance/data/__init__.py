"""Facts, prompts about them, their tokens, and small worlds of stated facts."""
