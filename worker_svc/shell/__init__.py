"""The worker as a service: gRPC, ownership, step streams, lifecycle, metrics."""
