"""Random and hostile input over both doors of a running stack (issue 6, Must show): what is sent, who sends it, what must hold."""
