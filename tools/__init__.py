"""Programs for those who work on this repository; nothing here is part of the package."""
