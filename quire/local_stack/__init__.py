"""A whole stack of processes on this machine: start, watch, restart, certificates."""
