"""Pickled checkpoints made into safetensors: what is converted, the isolated process that opens the pickle, what is checked."""
