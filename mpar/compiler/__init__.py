"""The compiler: from a model, a mesh and a strategy to a program. Ranks never load it."""
