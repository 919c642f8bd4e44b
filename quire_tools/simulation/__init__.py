"""The scheduler core in virtual time: real scheduler and block ledger; simulated workers, network and clock, from one seed.

`cost_model` models step durations, `token_model` outputs; `worker` answers plans, `link` simulates
the stream between scheduler and worker; `simulation` is the loop, `history` its record, `workloads` the
requests.
"""
