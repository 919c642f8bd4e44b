"""Mixed planning: prefill and decode in one step, as in vLLM V1; used by the default policy."""
