"""Connections between processes: gRPC conventions, TLS, peers, malformed messages."""
