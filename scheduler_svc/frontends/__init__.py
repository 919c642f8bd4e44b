"""The gateways that read, and what is still to be written to each."""
