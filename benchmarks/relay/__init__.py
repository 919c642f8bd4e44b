"""TODO benchmarks/relay"""
