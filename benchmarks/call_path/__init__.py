"""TODO benchmarks/call_path"""
