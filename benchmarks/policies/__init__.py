"""TODO benchmarks/policies"""
