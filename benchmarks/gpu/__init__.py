"""TODO benchmarks/gpu"""
