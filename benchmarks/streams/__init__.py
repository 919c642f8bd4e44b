"""TODO benchmarks/streams"""
