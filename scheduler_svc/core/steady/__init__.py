"""The fast path: running sequences in plain decode as columns, planned and settled with a few array operations (design.md 4).

`rows` owns the columns, `blocks` gives rows their blocks, `running` wraps the running phase, `outputs` the output rules; `share` is
how steady rows stand in plans and outcomes.
"""
