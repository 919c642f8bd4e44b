"""Queries of the operators' commands to a running stack, and the presentation of the answers."""
