"""The order of work on a device: queues, streams, and tokens that the host does not know yet."""
