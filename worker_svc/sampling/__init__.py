"""From logits to tokens: rules, masks, draws, log probabilities, guesses."""
