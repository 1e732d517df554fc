"""The decoder: its config, its parameters, and the segments that its chain is made of."""
