"""Stages of planning a step, one module per way: `mixed` (v1), `prefill`, `decode`, `swapped` and what is made of them (v0)."""
