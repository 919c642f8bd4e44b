"""Ways of using the ledger, one module per reference; all fit the core's `CacheRules` seam."""
