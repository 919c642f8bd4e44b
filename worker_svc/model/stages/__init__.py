"""Stages of a pipeline: ranges of a decoder's layers, each with its own weights and cache, and hidden states between them."""
