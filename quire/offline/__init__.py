"""`LLM`: scheduler and engine in this process, without services."""
