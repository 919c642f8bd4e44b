"""Tool calls: the formats of model families, the parsers, and grammars that force calls."""
