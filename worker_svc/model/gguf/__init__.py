"""Reads GGUF files, llama.cpp's format: configuration, tokenizer, chat template and weights in one file."""
