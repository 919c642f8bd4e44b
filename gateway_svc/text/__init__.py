"""Text and tokens: tokenizer, chat template, detokenising, stop strings. No weights, no calls."""
