"""Where keys and values are: cache groups, the tensors of their blocks, and their memory."""
