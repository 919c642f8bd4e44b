"""Commands of operators: load, workers, steps, reasons, blocks, policies, adapters, recordings."""
