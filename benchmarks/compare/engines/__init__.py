"""What is compared: a file for each peer, behind `Engine` (base)."""
