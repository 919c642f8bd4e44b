"""Perplexity of the built-in model in each format of quantized weights, in Quire and in the format's own package."""
