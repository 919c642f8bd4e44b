"""Ids, reference counts and hashes of KV-cache blocks; no tensors and no scheduler types.

`eviction_queue` orders free blocks, `pool` counts references on one device and maps prefix hashes to blocks,
`ledger` holds both pools and all block tables, `rules` are the ways in which schedulers use the ledger,
`integrity` checks all invariants from scratch.
"""
