"""`make gpu-check`: what this project is worth on this machine's GPU, on one page."""
