"""Fast decode: running sequences in plain decode are rows of arrays, planned and committed by a few array
operations.

`rows` owns the arrays, `blocks` allocates and registers blocks of rows, `outputs` wraps the output rules, and
`policies/mixed/fast_running.py` the running phase; `share` is the form of rows in plans and outcomes.
"""
