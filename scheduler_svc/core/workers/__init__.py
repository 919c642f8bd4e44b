"""Worker groups as the core plans them: their plans in flight, and groups that move between them."""
