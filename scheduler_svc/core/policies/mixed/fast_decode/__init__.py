"""Fast decode: running sequences in plain decode are rows of arrays, planned and committed by a few array
operations.

`rows` owns the arrays, `blocks` allocates and registers blocks of rows, `running` wraps the running phase,
`outputs` the output rules; `share` is the form of rows in plans and outcomes.
"""
