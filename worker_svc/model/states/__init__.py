"""Layers that keep one state per sequence: recurrent ones and short convolutions. Found, stored in blocks, and run by sequences."""
