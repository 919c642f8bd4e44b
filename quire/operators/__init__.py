"""What the operators' commands ask of a running stack, and how they show it."""
