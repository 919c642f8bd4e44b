"""The step loop: intake, plan, send, commit results, publish."""
