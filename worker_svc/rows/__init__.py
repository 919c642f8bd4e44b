"""The persistent batch: the worker's state of every row, and how step messages change it."""
