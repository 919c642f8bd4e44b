"""Figures of the source tree: sizes, rooms, names, words and imports. `python -m tests.repo.figures` prints them."""
