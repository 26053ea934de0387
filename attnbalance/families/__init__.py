"""Every causal-LM family of transformers, tiny and random: is it read right?"""
