"""Tests of the tree itself: its documents, generated code, containers, layers, names and limits."""
