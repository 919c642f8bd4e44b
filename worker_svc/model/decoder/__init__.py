"""The decoder within a model of transformers: where it is, and what it reads beside tokens."""
