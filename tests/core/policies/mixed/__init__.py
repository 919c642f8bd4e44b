"""Tests of steps that mix prefill and decode: `quire` and vLLM V1."""
