"""TODO benchmarks/tracing"""
