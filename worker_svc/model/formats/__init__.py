"""Quantized weights in safetensors files: how they are stored, by quantization_config, and what their numbers stand for."""
