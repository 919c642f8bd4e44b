"""From logits to tokens: rules, masks, sampling, logprobs, draft tokens."""
