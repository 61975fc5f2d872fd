"""`make gpu-check`: what this project is worth on this machine's GPU, on one page."""

WANTED = "put their wheels into a folder and write wheels=FOLDER (--help says how)"
"""What to do about a package that cannot be imported."""
