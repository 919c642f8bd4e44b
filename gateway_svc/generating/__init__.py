"""Path from a request to its events, shared by the gRPC and the OpenAI API."""
