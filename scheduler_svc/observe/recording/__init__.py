"""Recordings of the scheduler core: every input as an event, every decision beside it; replay, what-if and probes.

`recorder` wraps a core and writes segments into a `ring`, each starting with a `snapshot`; `file_format` and `codec` write
them to a file, `replay` runs it. Nothing here knows gRPC.
"""
