"""Between a conversation and its typed events: what templates are told, how output is parsed, what forces calls. Pure, no I/O."""
