"""Whole stacks of processes: started, used, disturbed."""
