"""Conversion of OpenAI's request bodies, and of other servers' fields, to requests. Pure."""
