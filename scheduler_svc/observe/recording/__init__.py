"""Recordings of the scheduler core: every input as an event, with every decision; and their replay.

`recorder` wraps a core and writes segments into the `record_buffer`, each starting with a `snapshot`;
`codec` and `file_format` write them to a file, `replay` runs them again. Nothing here depends on gRPC.
"""
