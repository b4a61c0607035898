"""What a causal language model needs around it to be trained: its loss, packed inputs, generation."""
