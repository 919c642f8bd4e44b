"""Recordings of the scheduler core: every input as an event, every decision beside it; replay, what-if and probes.

`recorder` wraps a core and writes into a `ring` of segments, each starting with a `snapshot`; `file_format` and `codec` bring them
into a file, `replay` back to life. Nothing here knows gRPC.
"""
