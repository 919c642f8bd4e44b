"""Random and hostile input over both doors of a running stack: what is sent, who sends it, what must hold."""
