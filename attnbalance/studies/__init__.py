"""`study`: ways of finetuning compared over worlds and seeds."""
