"""Conversion of events of generations to OpenAI's JSON. Pure."""
