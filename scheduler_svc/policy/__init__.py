"""What an operator chose: words, files and knobs, and the policy and limits that they come to."""
