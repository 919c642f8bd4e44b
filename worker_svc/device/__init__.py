"""Order of work on a device: queues, streams, and tokens not yet known on the host."""
