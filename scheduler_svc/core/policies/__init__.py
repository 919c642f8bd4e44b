"""How steps are planned, one folder per family of policies."""
