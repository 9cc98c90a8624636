"""Loading: seconds and peak memory of reading a random model, one fresh process a sample."""
