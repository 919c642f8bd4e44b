"""TODO benchmarks/overlap"""
