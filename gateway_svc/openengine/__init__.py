"""The contract `openengine.v1` on the gateway's gRPC port, with --openengine; see docs/routers.md."""
