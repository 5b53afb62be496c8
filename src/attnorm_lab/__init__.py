"""The laboratory of attnorm: where our results come from. It imports attnorm; attnorm never imports it."""
