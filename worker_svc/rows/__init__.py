"""The persistent batch: what the worker knows of every row, and how messages change it."""
