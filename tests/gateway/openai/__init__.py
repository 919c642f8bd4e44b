"""Tests of OpenAI's API."""
