"""Prefill and decode mixed in one step, as vLLM V1 does, and the default policy."""
