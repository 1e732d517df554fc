"""Keys: how the entries of a config.json are read, checked and refused."""
