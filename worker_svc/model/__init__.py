"""The checkpoint as a model over the paged cache: loading, checks, attention, input tensors and memory."""
