"""Tool calls: the formats that models write them in, the parser, and grammars that force them."""
