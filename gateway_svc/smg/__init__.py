"""The engine contract of SGLang Model Gateway (`vllm.grpc.engine.VllmEngine`) on the gateway's gRPC port; see docs/routers.md."""
