"""Text and tokens: tokenizer, chat template, detokenisation, stop strings. No weights, no calls."""
