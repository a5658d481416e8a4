"""The loss of a language model from its last hidden state, without logits of all rows at once."""
