"""Tests of LoRA adapters."""
