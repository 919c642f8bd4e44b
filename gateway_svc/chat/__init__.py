"""Between a chat request and its events: template input, output parsing, grammars that force calls. Pure, no I/O."""
