"""Perplexity of the built-in model in each format of quantized weights: as Quire computes it, and as the format's own package does."""
