"""The checkpoint as a model over the paged cache: loading, checks, attention, the shape of a pass, memory."""
