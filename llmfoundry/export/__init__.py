"""Out of the house: formats that others read."""
