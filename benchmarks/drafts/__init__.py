"""Speculative decoding: steps that each proposer of draft tokens saves."""
