"""A whole Quire stack as child processes on this machine: start, watch, restart, certificates."""
