"""Functions of the kinds that researchers write, compiled for four meshes: which are exact, and what their ranks exchange."""
