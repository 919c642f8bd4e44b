"""Tests of draws and grammars."""
