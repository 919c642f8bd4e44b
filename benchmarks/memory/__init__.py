"""TODO benchmarks/memory"""
