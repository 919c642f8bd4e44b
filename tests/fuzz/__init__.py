"""Random and hostile input over both APIs of a running stack: inputs, clients, and what must hold."""
