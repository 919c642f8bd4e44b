"""The compared engines: a file per peer, behind `Engine` (base)."""
