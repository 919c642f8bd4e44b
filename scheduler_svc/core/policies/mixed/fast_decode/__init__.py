"""The fast path: running sequences in plain decode as columns, planned and committed with a few array operations.

`rows` owns the columns, `blocks` gives rows their blocks, `running` wraps the running phase, `outputs` the output rules; `share`
is how these rows stand in plans and outcomes.
"""
