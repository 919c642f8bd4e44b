"""Requests that the gateway sent to the scheduler: state, updates, tokens and spans of each."""
