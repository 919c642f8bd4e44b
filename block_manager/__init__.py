"""Ids, counts and hashes of KV-cache blocks; never a tensor, never a scheduler type (design.md 5, R2, R3).

`free_queue` orders free blocks, `pool` counts references on one device and remembers prefixes, `ledger` holds both pools and
all block tables, `rules` are the ways in which schedulers use the ledger, `integrity` recomputes everything from scratch.
"""
