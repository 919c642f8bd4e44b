"""`quire top`: `numbers` are gathered from answers and `steps`, `live` and `recorded` read these, `drawing` shows them."""
