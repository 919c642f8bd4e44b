"""`quire top`: `live` and `recorded` gather `numbers` from answers and `steps`; `drawing` shows them."""
