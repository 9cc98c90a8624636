"""Whether one configuration computes what another does: perplexity of a text, and greedy tokens."""
