"""Convert pickled checkpoints to safetensors: file selection, an isolated process that opens the pickle, and checks."""
