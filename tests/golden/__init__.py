"""Runs scenario files of `README.md` beside this file through the core that serves: `python -m tests.golden DIR...`."""
