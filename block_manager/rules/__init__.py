"""Cache rules: ways of using the ledger, one module per reference; each implements `CacheRules`."""
