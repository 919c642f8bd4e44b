"""TODO benchmarks/growth"""
