"""Finetuning and pretraining on facts: splits, objectives, trained weights, runs."""
