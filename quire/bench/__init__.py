"""Load against a running service: what is asked and when, who is asked, and what the answers took."""
