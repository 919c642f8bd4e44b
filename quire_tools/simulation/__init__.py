"""The scheduler core in virtual time: real scheduler and block ledger; simulated workers, network and clock, from one seed.

`cost_model` models step durations, `token_model` outputs; `virtual_worker` answers plans, `link` simulates
the stream between scheduler and worker; `simulation` is the loop, `history` its record, `workloads` the
requests. The simulated worker of running stacks, with rows and a cache, is `quire_tools.simulated_worker`
(docs/decisions/0018).
"""
