"""Planning of vLLM 2023 and 0.6.3: separate prefill and decode phases."""
