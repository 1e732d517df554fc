"""What the developers of mpar use besides its tests: none of it is installed with the package."""
