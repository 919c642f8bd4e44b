"""TODO benchmarks/scheduler_core"""
