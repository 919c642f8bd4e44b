"""The whole core in virtual time: real scheduler, real ledger; simulated workers, network and clock under one seed.

`cost_model` says how long a step takes, `token_model` what comes out of it, `worker` holds rows and blocks as a real one would,
`link` is the stream between scheduler and worker, `simulation` the loop, `history` what happened, `workloads` who asks for what.
"""
